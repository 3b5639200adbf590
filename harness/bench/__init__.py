"""Benchmarks: ``zeropp bench``, ``zeropp calibrate`` and ``zeropp trace``.

``zeropp bench`` times each candidate alternately with a reference in the same run, so that ratios can be compared
between machines.
"""
