"""Numerical functions of arrays, which import only jax and numpy; installed as `jfl.kernels`."""
