"""Measures a trial while it runs (times, memory, processors, errors), and describes the machine."""
