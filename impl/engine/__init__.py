"""The engine: methods for training loops, hooks that run in forward and backward passes, and masters (fp32 weights)."""
