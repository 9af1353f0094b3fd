"""megagen writes mega-kernels: one persistent CUDA kernel per mixture-of-experts layer shape."""

__version__ = "0.1.0"
