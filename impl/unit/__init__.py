"""Defines units: the parameters of a block of the model, with this rank's shard, gathered weights and gradients."""
