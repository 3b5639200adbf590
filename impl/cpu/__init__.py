"""Implements codecs, which encode tensors as bytes for messages, on CPU tensors in C++.

The folder has the C++ sources, a module that builds a library from them, and a module that calls the library.
"""
