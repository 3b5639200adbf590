"""Implements codecs, which encode tensors as bytes for messages, on CUDA.

The folder has the kernels' sources, and the modules that launch them with CuPy.  No other folder imports CuPy.
"""
