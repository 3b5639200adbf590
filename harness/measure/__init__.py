"""Measures a trial while it runs (times, memory, processors, errors), checks it, and describes the machine."""
