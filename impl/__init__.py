"""A from-scratch ZeRO-3 and ZeRO++.  Importing this package imports neither torch nor cupy."""

__version__ = "0.2.0"
