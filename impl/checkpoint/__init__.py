"""Checkpoints: saving, loading, exporting, and the files on disk."""
