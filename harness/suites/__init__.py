"""Suites as data: reads a suite file, and expands it into the trials that answer its question.

Nothing here imports torch, so that a suite is checked within a second.
"""
