"""Reads a suite file, and expands the suite into the trials that answer its question.

No module of this package imports torch, so that a suite is checked within a second.
"""
