"""CUDA kernels as files and their launchers (CuPy); the only place that imports cupy."""
