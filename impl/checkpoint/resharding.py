"""Writes the file of each rank in a checkpoint, and reads any part of a parameter from these files.

A file holds *ranges*: a range is elements [start, end) of one flattened parameter.  In the file it has the name
``KIND/NAME@START``.  KIND says which values these are, such as ``weight`` or ``optimizer0.exp_avg``, and NAME is the
parameter's name.  Units, shards and ranks are no part of the name, so a run with another sharding can read the elements
of its own shards from the files of all ranks.

With local steps (DiLoCo) each group of ranks saves all elements of trained parameters, since the groups have different
values.  In the files of the first group the names of these ranges are as above.  In the files of the other groups they
begin with the group's number, as in ``group1:KIND/NAME@START``.

Files have the safetensors format.
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
from impl.policy.shard_layout import UnitGeometry


class Range(NamedTuple):
    """Elements [start, end) of a flattened parameter, and the slice of a shard or master that holds them.

    A master is the part of a shard that an optimizer steps, in fp32.
    """

    name: str  # of the parameter
    start: int
    end: int
    place: slice  # where the shard or master has these elements

    def key(self, kind: str) -> str:
        """Returns the name, ``KIND/NAME@START``, under which a file of the checkpoint holds this range.

        ``kind`` says which values: for example ``weight`` or ``optimizer0.exp_avg``.
        """
        return f"{kind}/{self.name}@{self.start}"


def ranges(
    geometry: UnitGeometry, rank: int, span: Sequence[int] = (), *, saved: bool = False
) -> Iterator[Range]:
    """Yield one range for each parameter that has elements in a rank's shard, or in the part ``span`` of the shard.

    The range says which elements of the parameter these are.  Padding belongs to no parameter, so no range contains it.

    Args:
        geometry: the layout of the unit to which the shard belongs.
        rank: the rank that has the shard.
        span: elements (start, end) of the shard; by default the whole shard.  The slice ``Range.place`` counts elements
            from ``start``, so that it is a slice of this part.
        saved: whether to yield only the elements that ``rank`` saves.  Several state groups may hold copies of a shard.
            Each element is then saved by only one of the ranks that hold it.
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
    """Write ``tensors`` to the file ``path`` and sync it to disk; returns the file's size in bytes and its SHA-256.

    Every tensor is copied to host memory first.

    Raises CheckpointError: if the file cannot be written, or does not support a tensor's type.
    """
    from safetensors import SafetensorError  # machines that write no checkpoints may lack this package
    from safetensors.torch import save_file

    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    try:
        save_file(copies, path, {"format": "pt"})  # tells other readers that these are torch's tensors
    except (SafetensorError, KeyError) as error:  # KeyError: a type that safetensors does not have
        raise CheckpointError(f"{path}: cannot be written: {raised(error)}") from None
    try:
        sync(path)
    except OSError as error:  # the disk accepted the bytes before, and cannot keep them
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None
    return digest_of(path)


class Parts:
    """The files of the checkpoint in folder ``path``, from which ranges of parameters are read."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        from safetensors import SafetensorError, safe_open

        self.path, self.manifest = path, manifest
        # By parameter and kind: for each saved range, its start and the number of its file.
        self.ranges = defaultdict[str, dict[str, list[tuple[int, int]]]](dict)
        names = [path / file_name(number) for number in range(len(manifest.files))]
        try:
            for name in names:
                regular_file.status(name)
            self._files: list[Any] = [safe_open(name, framework="pt") for name in names]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        for number, file in enumerate(self._files):
            for key in file.offset_keys():
                kind, _, rest = key.partition("/")
                name, at, start = rest.rpartition("@")
                # The kind without a state group's prefix, such as ``group1:``.
                _, _, plain = kind.rpartition(":")
                if at and (plain == "weight" or plain.startswith("optimizer")):
                    self.ranges[name].setdefault(kind, []).append((int(start), number))

    def read(self, kind: str, name: str, start: int, end: int) -> Tensor:
        """Returns saved values of elements [start, end) of the parameter ``name``, as a copy (end - start,).

        ``kind`` says which values: for example ``weight`` or ``optimizer0.exp_avg``.

        Raises CheckpointError: if one of these elements is in no file.
        """
        parts = []
        for low, number in sorted(self.ranges[name].get(kind, [])):
            values = self._files[number].get_tensor(f"{kind}/{name}@{low}")  # maps only this tensor's pages
            parts.append(values[max(start - low, 0) : max(end - low, 0)])
        if (count := sum(map(len, parts))) != end - start:
            raise CheckpointError(
                f"{self.path}: the files hold {count} values of {kind} for elements {start} to {end - 1} of parameter "
                f"{name!r}, expected {end - start}: load another checkpoint"
            )
        return torch.cat(parts) if parts else torch.empty(0)

    def fill(self, whole: Tensor, kind: str, wanted: Iterable[Range]) -> Tensor:
        """Copy saved values to ``whole`` (n,), a shard or a part of a shard, and return ``whole``.

        ``kind`` says which values: for example ``weight`` or ``optimizer0.exp_avg``.  ``wanted`` are the ranges to
        copy, and their places in ``whole``.
        """
        for part in wanted:
            whole[part.place] = self.read(kind, part.name, part.start, part.end)
        return whole

    def tensors(self, number: int, kind: str) -> dict[str, Tensor]:
        """Returns copies of the tensors that file ``number`` holds under names ``kind/NAME``, as a dict by NAME.

        ``number`` is the rank that saved the file.  For example, ``kind = "buffer"`` in file 0 gives all buffers.
        """
        file, prefix = self._files[number], f"{kind}/"
        keys = [key for key in file.offset_keys() if key.startswith(prefix)]
        return {key.removeprefix(prefix): file.get_tensor(key).clone() for key in keys}
