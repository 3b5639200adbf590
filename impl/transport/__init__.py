"""Moves the messages of :mod:`impl.comm.wire`: by process groups, by shared memory, or between threads.

Also runs work on a GPU's side streams.
"""
