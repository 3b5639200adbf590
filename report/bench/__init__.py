"""The page of ``zeropp bench``."""
