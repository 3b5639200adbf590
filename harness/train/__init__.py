"""``zeropp train``: training by a DeepSpeed configuration."""
