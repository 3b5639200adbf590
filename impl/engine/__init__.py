"""The engine of a sharded model.

It consists of the methods that a training loop calls, the hooks that run in forward and backward passes, and the
masters (the fp32 weights of a rank's shards, which the optimizer steps).
"""
