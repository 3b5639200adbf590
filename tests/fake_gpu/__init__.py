"""GPUs without a GPU: fake NVIDIA libraries for torch's CUDA build, true values, and a race detector (README.md)."""
