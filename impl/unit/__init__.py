"""Units: the parameters of a block of the model, with their shard, their gathered weights and their gradients."""
