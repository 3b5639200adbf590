"""Units: one block of the model with its shard, its gathered weights and its gradients."""
