"""``zeropp bench``: timings beside peers, as ratios within one run."""
