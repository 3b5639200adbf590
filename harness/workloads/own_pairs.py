"""Makes a data set of the inputs and targets that a user's function returns.  Does not import torch."""

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
    """A data set of examples that a user's function returned.

    The function returns two pairs of arrays ``(inputs, targets)``: a pair for training and a pair for validation.  The
    first dimension of an array counts examples.  The model gets floating-point arrays as float32, and all other arrays
    as int64.
    """

    def __init__(self, source: str, parts: Any) -> None:
        checked = [_pair(f"corpus {source!r}:", part, pair) for part, pair in zip(_PARTS, parts, strict=True)]
        for side, (train, validation) in zip(_SIDES, zip(*checked, strict=True), strict=True):
            if (train.shape[1:], train.dtype) != (validation.shape[1:], validation.dtype):
                shapes = [f"{array.shape[1:]} of {array.dtype}" for array in (train, validation)]
                why = f"{side}s are {shapes[0]} for training and {shapes[1]} for validation"
                raise CorpusError(f"corpus {source!r}: {why}; expected the same shape and type")
        self.train, self.validation = checked
        digest = hashlib.sha256()
        for array in (*self.train, *self.validation):
            digest.update(str((array.dtype.str, array.shape)).encode())
            digest.update(array.data)
        self.sha256 = digest.hexdigest()

    @property
    def example_bytes(self) -> int:
        """Bytes of one example, input and target together, in the types that the model gets."""
        return sum(array[0].size * _model_type(array).itemsize for array in self.train)

    def count(self, part: _Arrays) -> int:
        """Return the number of examples in a part."""
        return len(part[0])

    def at(self, part: _Arrays, numbers: list[int], keys: list[str]) -> Pair:
        """Return the examples ``numbers`` of a part.  Nothing in them is random, so ``keys`` are not used."""
        inputs, targets = (array[numbers].astype(_model_type(array)) for array in part)
        return inputs, targets


def are_pairs(parts: Any) -> bool:
    """Return whether a user's function returned pairs of arrays, rather than two arrays of tokens."""
    return any(_is_pair(part) for part in parts)


def _pair(origin: str, part: str, pair: Any) -> _Arrays:
    """Return the inputs and the targets of ``pair`` as two arrays with the same number of examples.

    Args:
        origin: Beginning of error messages.
        part: ``training`` or ``validation``, for error messages.
        pair: The pair that a user's function returned.

    Raises:
        CorpusError: if ``pair`` is no pair of arrays of numbers, or if the arrays have unequal numbers of examples.
    """
    if not _is_pair(pair) or len(pair) != len(_SIDES):
        returned = (
            f"a {type(pair).__name__} of length {len(pair)}"
            if _is_pair(pair)
            else f"a value of type {type(pair).__name__}"
        )
        raise CorpusError(f"{origin} returned {returned} for {part}; expected a pair of inputs and targets")
    inputs, targets = (
        _array(f"{origin} {name} for {part}", side) for name, side in zip(_SIDES, pair, strict=True)
    )
    if len(inputs) != len(targets):
        counts = f"the numbers of inputs and targets for {part} are {len(inputs)} and {len(targets)}"
        raise CorpusError(f"{origin} {counts}; expected equal numbers")
    return inputs, targets


def _is_pair(part: Any) -> bool:
    """Return whether ``part`` is a list or tuple of arrays.

    The result is False for a single array, such as an array of tokens, and for a list of numbers.
    """
    return isinstance(part, tuple | list) and bool(part) and all(hasattr(side, "__len__") for side in part)


def _model_type(array: NDArray[Any]) -> np.dtype[Any]:
    """Return the type in which the model gets the numbers of an array: float32 or int64."""
    return np.dtype(np.float32 if array.dtype.kind == "f" else np.int64)


def _array(origin: str, value: Any) -> NDArray[Any]:
    """Return a value as an array.

    Raises:
        CorpusError: if the value is no array of finite numbers with at least one example.  The message begins with
            ``origin``.
    """
    with raising(CorpusError, f"{origin}: no array:"):
        array = np.ascontiguousarray(value)
    if array.dtype.kind not in "fiub":
        raise CorpusError(f"{origin}: is an array of {array.dtype}; expected numbers")
    if not len(array):
        raise CorpusError(f"{origin}: is an array of shape {array.shape}; expected at least one example")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise CorpusError(f"{origin}: contains NaN or infinity; expected finite numbers")
    return array
