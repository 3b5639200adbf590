"""tests/impl/deepspeed."""
