"""Arrays in, arrays out; imports jax and numpy only.  Installed as `jfl.kernels`."""
