"""One block of the model: its shard, its gathered weights, its gradients."""
