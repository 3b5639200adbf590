"""``zeropp whatif``: predicts a user's training step under another policy or link, from torch.profiler's traces."""
