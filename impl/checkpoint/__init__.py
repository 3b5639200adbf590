"""Saves and loads checkpoints, exports them as one state dict, and defines their files."""
