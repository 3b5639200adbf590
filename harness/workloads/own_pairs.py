"""A user's own pairs of arrays: what a model reads, and what it is to answer.  No torch."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from harness.errors import CorpusError
from harness.workloads.dataset import Dataset, Pair
from impl.errors import raising

_PARTS: Final = ("training", "validation")
_SIDES: Final = ("input", "target")
_Arrays = tuple[NDArray[Any], NDArray[Any]]


class OwnPairs(Dataset):
    """Examples of a function that returned ``(input, target)`` for training and for validation.

    An entry of the first dimension each; floating numbers reach the model as float32, all others as int64.
    """

    def __init__(self, source: str, parts: Any) -> None:
        checked = [_pair(f"corpus {source!r}:", part, pair) for part, pair in zip(_PARTS, parts, strict=True)]
        for side, (train, validation) in zip(_SIDES, zip(*checked, strict=True), strict=True):
            if (train.shape[1:], train.dtype) != (validation.shape[1:], validation.dtype):
                said = [f"{array.shape[1:]} of {array.dtype}" for array in (train, validation)]
                told = f"{side}s are {said[0]} for training and {said[1]} for validation"
                raise CorpusError(f"corpus {source!r}: {told}; expected the same")
        self.train, self.validation = checked
        digest = hashlib.sha256()
        for array in (*self.train, *self.validation):
            digest.update(str((array.dtype.str, array.shape)).encode())
            digest.update(array.data)
        self.sha256 = digest.hexdigest()

    @property
    def example_bytes(self) -> int:
        """Bytes of one input and its target as a model gets them."""
        return sum(array[0].size * _sent(array).itemsize for array in self.train)

    def count(self, part: _Arrays) -> int:
        """Number of examples in a part."""
        return len(part[0])

    def at(self, part: _Arrays, numbers: list[int], keys: list[str]) -> Pair:
        """The examples of these numbers; ``keys`` decide nothing."""
        read, answer = (array[numbers].astype(_sent(array)) for array in part)
        return read, answer


def are_pairs(parts: Any) -> bool:
    """Whether a function returned pairs of arrays, and not two rows of tokens."""
    return any(_is_pair(part) for part in parts)


def _pair(whose: str, part: str, pair: Any) -> _Arrays:
    """Refuse what is no pair of arrays, as many inputs as targets."""
    if not _is_pair(pair) or len(pair) != len(_SIDES):
        found = f"{len(pair)} arrays" if _is_pair(pair) else type(pair).__name__
        raise CorpusError(f"{whose} {found} for {part}; expected a pair, input and target")
    read, answer = (
        _array(f"{whose} {name} for {part}", side) for name, side in zip(_SIDES, pair, strict=True)
    )
    if len(read) != len(answer):
        counts = f"{len(read)} inputs and {len(answer)} targets for {part}"
        raise CorpusError(f"{whose} {counts}; expected as many of both")
    return read, answer


def _is_pair(part: Any) -> bool:
    """Whether a part is several arrays; a row of tokens is one, or a list of numbers."""
    return isinstance(part, tuple | list) and bool(part) and all(hasattr(side, "__len__") for side in part)


def _sent(array: NDArray[Any]) -> np.dtype[Any]:
    """The type in which a model gets an array's entries."""
    return np.dtype(np.float32 if array.dtype.kind == "f" else np.int64)


def _array(whose: str, value: Any) -> NDArray[Any]:
    """Refuse what is no array of numbers with at least one example."""
    with raising(CorpusError, f"{whose}: no array:"):
        found = np.ascontiguousarray(value)
    if found.dtype.kind not in "fiub":
        raise CorpusError(f"{whose}: an array of {found.dtype}; expected numbers")
    if not len(found):
        raise CorpusError(f"{whose}: an array {found.shape}; expected one example or more")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise CorpusError(f"{whose}: holds NaN or infinity; expected finite numbers")
    return found
