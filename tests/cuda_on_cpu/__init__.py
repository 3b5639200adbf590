"""Runs unmodified CUDA sources on the host: the shim ``cuda_on_cpu.h`` and what builds and calls it."""
