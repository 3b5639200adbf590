"""impl/codecs."""
