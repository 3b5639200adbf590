"""What a trial trains: its model, its data set, and the batches that each rank reads."""
