"""Safetensors files, written as a stream and read by ranges.

Pure: no torch.  The format is https://huggingface.co/docs/safetensors, "Format": 8 bytes, the length of
the header as a little-endian integer; the header, JSON padded with spaces; then the tensors' bytes,
little-endian, row by row, without gaps.  Files are those that the ``safetensors`` library writes and
reads; it is not used because it takes all tensors at once and says nothing of their digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from impl.checkpoint import atomic_files as disk
from impl.checkpoint.atomic_files import Bytes, CheckpointError
from impl.checkpoint.strict_json import parsed

ITEM_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_LENGTH: Final = 8  # bytes of the header's length
_ALIGN: Final = 8  # bytes of which the header is a multiple
_LONGEST: Final = 100_000_000  # bytes of a header; the library's limit
_METADATA: Final = "__metadata__"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its type by the format's name, and its shape.

    Raises:
        CheckpointError: for a type that the format, or this reader, does not have.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError(f"type {self.dtype!r}: expected one of {', '.join(ITEM_BYTES)}")

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is on disk: its size, and the SHA-256 of its bytes in hex."""

    nbytes: int
    sha256: str


def write(
    path: Path,
    entries: Mapping[str, Entry],
    contents: Iterable[Bytes],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write and sync a new file; one tensor's bytes are asked for at a time.

    Args:
        path: of the file, which must not be there.
        entries: tensors by name, in the order of the file.
        contents: the bytes of each of them, in that order.
        metadata: texts for the header.

    Raises:
        OSError: if it cannot be written.
        ValueError: for contents of another number or size than the entries'.
    """
    described: dict[str, object] = {} if not metadata else {_METADATA: dict(metadata)}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.nbytes
        described[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end)}
    head = json.dumps(described, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGN)
    digest = hashlib.sha256()
    with disk.create(path) as file:
        for data in (len(head).to_bytes(_LENGTH, "little"), head):
            disk.write(file, data)
            digest.update(data)
        for (name, entry), content in zip(entries.items(), contents, strict=True):
            view = memoryview(content).cast("B")
            if view.nbytes != entry.nbytes:
                raise ValueError(f"{name!r} has {view.nbytes} bytes, not {entry.nbytes}")
            disk.write(file, view)
            digest.update(view)
        disk.sync(file)
    return Written(_LENGTH + len(head) + end, digest.hexdigest())


class Reader:
    """A file to be read by ranges of elements.

    Args:
        path: of the file.

    Attributes:
        entries: tensors by name, in the order of the file.
        metadata: the header's texts.

    Raises:
        CheckpointError: for a file that is not there, cut short, or not of the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            self._file = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        try:
            self.entries, self.metadata, self._starts = self._header()
        except BaseException:
            self._file.close()
            raise

    def _header(self) -> tuple[dict[str, Entry], dict[str, str], dict[str, int]]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(_LENGTH), "little")
        if size < _LENGTH or length > min(size - _LENGTH, _LONGEST):
            raise CheckpointError(
                f"{self.path}: not a safetensors file, or cut short: {size} bytes, header of {length}"
            )
        try:
            described = parsed(self._file.read(length))
            metadata = dict(described.pop(_METADATA, {}))
            entries, starts, runs = {}, {}, []
            for name, one in described.items():
                entries[name] = Entry(one["dtype"], tuple(map(_count, one["shape"])))
                start, end = map(_count, one["data_offsets"])
                starts[name] = _LENGTH + length + start
                runs.append((start, end))
                if end - start != entries[name].nbytes:
                    raise CheckpointError(f"{name!r} has {end - start} bytes, not {entries[name].nbytes}")  # noqa: TRY301
            ends = [0, *(end for _, end in sorted(runs))]
            if [start for start, _ in sorted(runs)] != ends[:-1]:
                raise CheckpointError("its tensors leave gaps, or overlap")  # noqa: TRY301
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{self.path}: not a safetensors file: its header is not one") from None
        wanted = _LENGTH + length + sum(entry.nbytes for entry in entries.values())
        if size != wanted:
            raise CheckpointError(f"{self.path}: {size} bytes, but its header says {wanted}")
        return entries, metadata, starts

    def entry(self, name: str) -> Entry:
        """What is known of a tensor.

        Raises:
            CheckpointError: if there is none of that name.
        """
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: has no {name!r}")
        return self.entries[name]

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytearray:
        """The bytes of elements [start, end) of a tensor, as it lies row by row; by default all.

        Raises:
            CheckpointError: if there is none of that name, or it has not so many elements.
        """
        entry = self.entry(name)
        end = entry.numel if end is None else end
        if not 0 <= start <= end <= entry.numel:
            raise CheckpointError(f"{self.path}: {name!r} has {entry.numel} elements, not [{start}, {end})")
        item = ITEM_BYTES[entry.dtype]
        data = bytearray((end - start) * item)
        self._file.seek(self._starts[name] + start * item)
        if self._file.readinto(data) != len(data):
            raise CheckpointError(f"{self.path}: cut short while it was read")
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _count(number: object) -> int:
    """``number``, if it is one that counts something."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number


def digest_of(path: Path) -> Written:
    """Size and SHA-256 of a file, as :func:`write` gives them.

    Raises:
        CheckpointError: if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return Written(file.tell(), digest.hexdigest())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
