"""A from-scratch implementation of ZeRO-3 and ZeRO++.

Importing this package alone imports neither torch nor CuPy.
"""

__version__ = "0.2.0"
