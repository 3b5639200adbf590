"""Reads DeepSpeed configurations as policies of this project."""
