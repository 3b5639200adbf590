"""Saves and loads checkpoints, exports a checkpoint as one state dict, and defines the files of checkpoints."""
