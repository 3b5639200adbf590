"""Measures formats on real weights and gradients, without training in them."""
