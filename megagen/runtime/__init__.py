"""Running kernels on GPUs: driver calls, symmetric memory, launches, and the MegaMoE layer."""
