"""Codecs in C++ for CPU tensors: the sources, how they are built once, and their bindings."""
