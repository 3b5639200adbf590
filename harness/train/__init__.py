"""``zeropp train``: trains a GPT as a DeepSpeed configuration describes."""
