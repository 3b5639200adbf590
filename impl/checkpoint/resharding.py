"""Ranks' files, and resharding: reading any range of a saved layout for another one.

The unit of saving is a *range*: elements [start, end) of one parameter, flattened, called
``KIND/NAME@START`` in its file.  Ranges do not depend on units, shards or ranks: a rank of another layout
reads those of its own shards from all files.  Files are safetensors, by the format's library.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impl import regular_file
from impl.checkpoint.commit import CheckpointError, digest_of, sync
from impl.checkpoint.manifest import Manifest, file_name
from impl.errors import raised
from impl.plan.shard_layout import UnitGeometry


class Range(NamedTuple):
    """Elements [start, end) of a parameter, and where they lie in a shard, or in a master of it."""

    name: str
    start: int
    end: int
    place: slice

    def key(self, kind: str) -> str:
        """Its name in a file."""
        return f"{kind}/{self.name}@{self.start}"


def ranges(
    geometry: UnitGeometry, rank: int, span: Sequence[int] = (), *, saved: bool = False
) -> Iterator[Range]:
    """The ranges in ``span`` (start, end) of a shard, by default all of it; padding belongs to none.

    ``saved`` ones are a part of these where state groups hold copies, so that nothing is saved twice.
    """
    first, _ = geometry.bounds(rank)
    start, end = span or (0, geometry.shard)
    piece_start, piece_end = geometry.own_piece(rank) if saved else (start, end)
    low, high = first + max(start, piece_start), first + min(end, piece_end)
    for slot in geometry.slots:
        begin, stop = max(slot.offset, low), min(slot.end, high)
        if begin < stop:
            place = slice(begin - first - start, stop - first - start)
            yield Range(slot.spec.name, begin - slot.offset, stop - slot.offset, place)


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, str]:
    """Write and sync a file, with one host copy a tensor; returns its bytes, and SHA-256 in hex."""
    from safetensors import SafetensorError  # machines that keep no checkpoint may lack it
    from safetensors.torch import save_file

    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    try:
        save_file(copies, path, {"format": "pt"})  # marks torch's tensors for other readers
    except (SafetensorError, KeyError) as error:  # or a type that such files do not have
        raise CheckpointError(f"{path}: {raised(error)}") from None
    sync(path)
    return digest_of(path)


class Parts:
    """The files of a checkpoint in folder ``path``, to be read by ranges of parameters."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        from safetensors import SafetensorError, safe_open

        self.path, self.manifest = path, manifest
        # By parameter, then kind: the starts of ranges, and the numbers of their files.
        self.ranges = defaultdict[str, dict[str, list[tuple[int, int]]]](dict)
        names = [path / file_name(number) for number in range(len(manifest.files))]
        try:
            for name in names:
                regular_file.status(name)
            self._files: list[Any] = [safe_open(name, framework="pt") for name in names]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        for number, file in enumerate(self._files):
            for key in file.offset_keys():
                kind, _, rest = key.partition("/")
                name, at, start = rest.rpartition("@")
                if at and (kind == "weight" or kind.startswith("optimizer")):
                    self.ranges[name].setdefault(kind, []).append((int(start), number))

    def read(self, kind: str, name: str, start: int, end: int) -> Tensor:
        """(end - start,) elements of a parameter, copied; a CheckpointError unless all were saved."""
        parts = []
        for low, number in sorted(self.ranges[name].get(kind, [])):
            values = self._files[number].get_tensor(f"{kind}/{name}@{low}")  # maps its pages alone
            parts.append(values[max(start - low, 0) : max(end - low, 0)])
        if (count := sum(map(len, parts))) != end - start:
            raise CheckpointError(
                f"{self.path}: has {count} of elements {start} to {end} of {kind} of {name!r}"
            )
        return torch.cat(parts) if parts else torch.empty(0)

    def fill(self, whole: Tensor, kind: str, wanted: Iterable[Range]) -> Tensor:
        """``whole``, a shard or a master (n,), with the saved values of its ranges."""
        for part in wanted:
            whole[part.place] = self.read(kind, part.name, part.start, part.end)
        return whole

    def tensors(self, number: int, kind: str) -> dict[str, Tensor]:
        """The tensors ``kind/NAME`` in a rank's file that are no ranges, by NAME."""
        file, prefix = self._files[number], f"{kind}/"
        keys = [key for key in file.offset_keys() if key.startswith(prefix)]
        return {key.removeprefix(prefix): file.get_tensor(key).clone() for key in keys}
