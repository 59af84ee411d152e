"""Arrays in, arrays out; imports jax only.  Installed as `jfl.kernels`."""
