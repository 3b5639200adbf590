"""Selects parts of a rank's memory: the parts that inference needs, the parts on the device, or those on the host.

A rank's memory is a dict from the name of each part, such as ``masters`` or ``gradients``, to its bytes.
"""

from __future__ import annotations

from typing import Final

HOST: Final = "host_"  # prefix of the names of parts in host memory
_STEPPED: Final = ("gradients", "optimizer")
TRAINING: Final = (  # parts that only training needs
    *_STEPPED,
    *(HOST + part for part in _STEPPED),
    "local_gradients",
    "feedback",
    "staging",
    "outer",
)


def without_training(memory: dict[str, int]) -> dict[str, int]:
    """Return the parts of memory that inference needs, with their bytes.

    ``memory`` has the bytes of each part, by the part's name.  Gradients, optimizer states and the other parts of
    :data:`TRAINING` are left out.
    """
    return {part: size for part, size in memory.items() if part not in TRAINING}


def on_device(memory: dict[str, int]) -> dict[str, int]:
    """Return the parts of memory that are on the device, with their bytes.

    ``memory`` has the bytes of each part of a rank's memory, by the part's name.
    """
    return {part: size for part, size in memory.items() if not part.startswith(HOST)}


def on_host(memory: dict[str, int]) -> dict[str, int]:
    """Return the parts of memory that are on the host, with their bytes.

    ``memory`` has the bytes of each part of a rank's memory, by the part's name.
    """
    return {part: size for part, size in memory.items() if part.startswith(HOST)}


def sum_parts(memory: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return the memory of two engines on one rank: for each part, the sum of both engines' bytes.

    ``memory`` and ``other`` have the bytes of each part of an engine's memory, by the part's name.
    """
    return {part: memory.get(part, 0) + other.get(part, 0) for part in memory | other}
