"""impl/deepspeed."""
