"""Runs unmodified CUDA sources on the host: the shim ``cuda_on_cpu.h``, its build and its calls."""
