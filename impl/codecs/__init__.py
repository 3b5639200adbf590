"""How elements become bytes: codecs as values, their specification in PyTorch, and rounding noise."""
