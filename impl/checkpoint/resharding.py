"""Ranks' files, and resharding: reading any range of a saved layout for another one.

The unit of saving is a *range*: elements [start, end) of one parameter, flattened, called
``KIND/NAME@START`` in its file.  Ranges know nothing of units, blocks, shards or ranks, so a checkpoint is
loaded onto another world size, stage, group or block size: each rank asks for the ranges that it holds,
wherever other ranks saved their elements.  Files are safetensors (https://huggingface.co/docs/safetensors),
written and read by the format's own library.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impl.checkpoint.commit import CheckpointError, digest_of, sync
from impl.checkpoint.manifest import Manifest, file_name
from impl.plan.shard_layout import Slot, UnitGeometry


class Range(NamedTuple):
    """Elements [start, end) of a parameter, which begin at element ``at`` of a shard."""

    slot: Slot
    start: int
    end: int
    at: int

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.slot.spec.name

    @property
    def numel(self) -> int:
        """Elements."""
        return self.end - self.start

    def key(self, kind: str) -> str:
        """What it is called in a file."""
        return f"{kind}/{self.name}@{self.start}"


def _ranges(geometry: UnitGeometry, low: int, high: int, origin: int) -> Iterator[Range]:
    """What elements [low, high) of a unit, whose shard begins at ``origin``, hold; padding is nobody's."""
    for slot in geometry.slots:
        begin, end = max(slot.offset, low), min(slot.end, high)
        if begin < end:
            yield Range(slot, begin - slot.offset, end - slot.offset, begin - origin)


def held_ranges(geometry: UnitGeometry, rank: int) -> Iterator[Range]:
    """What ``rank``'s shard holds."""
    low, high = geometry.bounds(rank)
    return _ranges(geometry, low, high, low)


def saved_ranges(geometry: UnitGeometry, rank: int) -> Iterator[Range]:
    """What ``rank`` saves: of groups that hold copies of one another, each a part, so nothing twice."""
    first, _ = geometry.bounds(rank)
    low, high = geometry.own_piece(rank)
    return _ranges(geometry, first + low, first + high, first)


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, str]:
    """Write and sync a file; returns its bytes, and their SHA-256 in hex.

    Each tensor is asked for once, and may go then: the host has a copy of all until they are written.

    Raises:
        CheckpointError: for a type that such files do not have, or if it cannot be written.
    """
    from safetensors import SafetensorError  # machines that keep no checkpoint may lack it
    from safetensors.torch import save_file

    held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    try:
        save_file(held, path, {"format": "pt"})  # by which other readers know torch's tensors
    except KeyError as error:
        name = next(name for name, tensor in held.items() if tensor.dtype == error.args[0])
        raise CheckpointError(f"{name}: type {error.args[0]} has no name in safetensors files") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None
    sync(path)
    return digest_of(path)


class Parts:
    """The files of a checkpoint in folder ``path``, to be read by ranges of parameters.

    Attributes:
        kinds: of each parameter, what was saved of its elements.

    Raises:
        CheckpointError: if a file cannot be read.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        from safetensors import SafetensorError, safe_open

        self.path, self.manifest = path, manifest
        self.kinds = defaultdict[str, set[str]](set)
        self._starts = defaultdict[tuple[str, str], list[tuple[int, int]]](list)  # and files
        try:
            self._files: list[Any] = [
                safe_open(path / file_name(number), framework="pt") for number in range(len(manifest.files))
            ]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        for number, file in enumerate(self._files):
            for key in file.offset_keys():
                kind, _, rest = key.partition("/")
                name, at, start = rest.rpartition("@")
                if at and (kind == "weight" or kind.startswith("optimizer")):
                    self.kinds[name].add(kind)
                    self._starts[kind, name].append((int(start), number))

    def read(self, kind: str, name: str, start: int, end: int) -> Tensor:
        """(end - start,) elements of a parameter, in memory of their own.

        Raises:
            CheckpointError: if some of them were not saved.
        """
        parts = []
        for low, number in sorted(self._starts[kind, name]):
            values = self._files[number].get_tensor(f"{kind}/{name}@{low}")  # maps its pages alone
            parts.append(values[max(start - low, 0) : max(end - low, 0)])
        if (held := sum(map(len, parts))) != end - start:
            lacking = f"has {held} of elements {start} to {end} of {kind} of {name!r}"
            raise CheckpointError(f"{self.path}: {lacking}")
        return torch.cat(parts) if parts else torch.empty(0)

    def tensors(self, number: int, kind: str) -> dict[str, Tensor]:
        """What is no range of a parameter in a rank's file, by the rest of its name, after ``kind/``."""
        file, prefix = self._files[number], f"{kind}/"
        keys = [key for key in file.offset_keys() if key.startswith(prefix)]
        return {key.removeprefix(prefix): file.get_tensor(key).clone() for key in keys}

    def entries(self) -> Iterator[tuple[str, Any]]:
        """The state dict: fp32 parameters, buffers, and extra states as JSON; whole, one by one."""
        for name, entry in self.manifest.state.items():
            if "parameter" in entry:
                numel = math.prod(entry["shape"])
                yield name, self.read("weight", entry["parameter"], 0, numel).view(entry["shape"])
            elif "buffer" in entry:
                yield name, self._files[0].get_tensor(f"buffer/{name}").clone()
            else:
                yield name, entry["extra"]
