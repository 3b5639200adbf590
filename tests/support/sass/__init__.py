"""Runs the machine code of compiled CUDA kernels on the host, and counts the instructions that it executes."""
