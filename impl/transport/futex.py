"""Waits in the kernel for a word of shared memory to change, without taking a core.

Linux's futex through the C library.  Where there are more ranks than cores, a rank that spins, or sleeps for
a guessed time, takes its time from the rank that it waits for.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Final

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
# A futex is 32 bits; of a 64-bit word the lower half must lie first.
_FITS: Final = sys.platform == "linux" and sys.byteorder == "little"
_NUMBER: Final = _NUMBERS.get(platform.machine()) if _FITS else None
_WAIT, _WAKE = 0, 1  # of words that processes share
_ALL: Final = 2**31 - 1


class _Span(ctypes.Structure):
    """A timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall if _NUMBER is not None else None
if _syscall is not None:
    _syscall.restype = ctypes.c_long


def available() -> bool:
    """Whether this machine has them."""
    return _syscall is not None


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the word at ``address`` is ``value``, at most ``seconds``; may return early.

    Args:
        address: of 32 bits, in memory that all processes map.
        value: its lower 32 bits, as last seen: if it has changed, this returns at once.
        seconds: at most.
    """
    assert _syscall is not None  # noqa: S101  # available() was asked
    whole = int(seconds)
    span = _Span(whole, int((seconds - whole) * 1e9))
    word = ctypes.c_uint32(value & 0xFFFFFFFF)
    _syscall(_NUMBER, ctypes.c_void_p(address), _WAIT, word, ctypes.byref(span), None, 0)


def wake(address: int) -> None:
    """Let all go on that wait for the word at ``address``, which has just been written."""
    assert _syscall is not None  # noqa: S101
    _syscall(_NUMBER, ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)
