"""Results as data: records of trials and benchmarks, and the statistics over them.

Nothing here imports torch, since reports are made from records alone.
"""
