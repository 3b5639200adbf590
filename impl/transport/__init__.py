"""What moves bytes below the wire: shared memory inside a node, side streams of a GPU, groups of ranks."""
