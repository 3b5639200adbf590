"""What is trained on what: models, corpora and batches."""
