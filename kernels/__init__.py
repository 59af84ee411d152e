"""Numerical kernels: arrays in, arrays out.  Imports jax and numpy only.  Installed as
`jfl.kernels`.
"""
