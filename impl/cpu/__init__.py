"""Implements codecs on CPU tensors in C++: the sources, their build, and the bindings to PyTorch."""
