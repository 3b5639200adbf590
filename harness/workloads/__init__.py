"""Builds a trial's model, and loads its data set and the batches that each rank reads."""
