"""All that a GPU must show about the kernels, in one command on one GPU."""
