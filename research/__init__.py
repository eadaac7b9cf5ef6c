"""Studies, the training of the toy model, and kernels: not installed, run from the root of a clone."""
