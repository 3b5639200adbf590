"""Access to parameters outside of passes: construct them in shards, gather them, read and write them by name."""
