"""Limits the rate of the link between nodes by one of three means.

These are network namespaces with a link between them, a queue on a host's network interface, and pauses that ranks make
between their messages.
"""
