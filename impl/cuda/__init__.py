"""Implements codecs on CUDA: the kernels' sources, and their launch by CuPy, which only this folder imports."""
