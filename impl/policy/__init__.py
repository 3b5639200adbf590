"""States what training sends, holds and computes, and over which ranks and shards, without torch."""
