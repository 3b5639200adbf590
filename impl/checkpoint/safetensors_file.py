"""Safetensors files, written as a stream and read by ranges.

Pure: no torch.  The format is https://huggingface.co/docs/safetensors, "Format": 8 bytes, the length of
the header as a little-endian integer; the header, JSON padded with spaces; then the tensors' bytes,
little-endian, row by row, without gaps.  The ``safetensors`` library reads; it does not write, because it
takes all tensors at once and says nothing of their digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from impl.checkpoint import atomic_files as disk
from impl.checkpoint.atomic_files import Bytes, CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

TYPES: Final = {  # by the format's name: bytes, and torch's name
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "I64": (8, "int64"), "I32": (4, "int32"),
    "I16": (2, "int16"), "I8": (1, "int8"), "U8": (1, "uint8"), "BOOL": (1, "bool"),
}  # fmt: skip
_LENGTH: Final = 8  # bytes of the header's length
_ALIGN: Final = 8  # bytes of which the header is a multiple
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
        if self.dtype not in TYPES:
            raise CheckpointError(f"type {self.dtype!r}: expected one of {', '.join(TYPES)}")

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * TYPES[self.dtype][0]


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
    head = len(head).to_bytes(_LENGTH, "little") + head
    digest = hashlib.sha256(head)
    with disk.create(path) as file:
        disk.write(file, head)
        for (name, entry), content in zip(entries.items(), contents, strict=True):
            view = memoryview(content).cast("B")
            if view.nbytes != entry.nbytes:
                raise ValueError(f"{name!r} has {view.nbytes} bytes, not {entry.nbytes}")
            disk.write(file, view)
            digest.update(view)
        disk.sync(file)
    return Written(len(head) + end, digest.hexdigest())


class Reader:
    """A file to be read by ranges of elements, by the format's own library.

    Attributes:
        entries: tensors by name, in the order of the file.
        metadata: the header's texts.

    Raises:
        CheckpointError: for a file that is not there, cut short, or not of the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for a writer
                raise CheckpointError(f"{path}: not a regular file")
            path.open("rb").close()  # the library's errors have no words of the system's
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        self._tensors: Any = None  # the library's handle, once there is something to read
        with self._opened("np") as file:  # without torch
            self.metadata: dict[str, str] = file.metadata() or {}
            try:
                slices = {name: file.get_slice(name) for name in file.offset_keys()}
                self.entries = {
                    name: Entry(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
                }
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from None

    def _opened(self, framework: str) -> Any:
        # Here, as machines that train and keep no checkpoint may lack it.
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.path, framework=framework)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: not a safetensors file, or cut short: {error}") from None

    def entry(self, name: str) -> Entry:
        """What is known of a tensor.

        Raises:
            CheckpointError: if there is none of that name.
        """
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: has no {name!r}")
        return self.entries[name]

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """(n,) elements [start, end) of a tensor, as it lies row by row; by default all.  Reads whole rows.

        Raises:
            CheckpointError: if there is none of that name, or it has not so many elements.
        """
        entry = self.entry(name)
        end = entry.numel if end is None else end
        if not 0 <= start <= end <= entry.numel:
            raise CheckpointError(f"{self.path}: {name!r} has {entry.numel} elements, not [{start}, {end})")
        if self._tensors is None:
            self._tensors = self._opened("pt")
        if not entry.shape or not entry.numel:
            first, part = 0, self._tensors.get_tensor(name)
        else:
            row = math.prod(entry.shape[1:])
            first = start // row * row
            part = self._tensors.get_slice(name)[start // row : -(-end // row)]
        flat: Tensor = part.reshape(-1)[start - first : end - first]
        return flat.clone()  # not the file's pages, which may go, nor where they happen to begin

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in its shape.

        Raises:
            CheckpointError: if there is none of that name.
        """
        return self.read(name).view(self.entry(name).shape)


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
