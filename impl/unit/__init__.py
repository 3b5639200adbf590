"""Defines units: the parameters of a block of the model, with their shard, gathered weights and gradients."""
