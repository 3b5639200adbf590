"""Measures the errors of codecs on real weights and gradients, without training with these codecs."""
