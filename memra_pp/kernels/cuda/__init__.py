"""The CUDA backend. CuPy is imported where a GPU is opened or a kernel compiled, and nowhere else."""
