"""DeepSpeed's configuration, read as a policy of this project."""
