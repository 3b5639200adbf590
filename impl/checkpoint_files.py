"""A checkpoint as files: where each rank's ranges lie, the manifest, and the rename that completes it.

Pure: no torch.  The unit of saving is a *range*: elements [start, end) of one parameter, flattened.
Ranges know nothing of units, blocks, shards or ranks, so any layout can read those of any other.
docs/checkpoints.md describes the files byte by byte.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from impl import disk
from impl.disk import CheckpointError
from impl.geometry import Slot, UnitGeometry
from impl.safetensors_file import Entry, Reader, digest_of

FORMAT: Final = "zeropp checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
# Kinds of entries of a rank's file, the part of their names before the first "/".
WEIGHT: Final = "weight"  # fp32, by range; optimizers' states beside it
BUFFER: Final = "buffer"  # in rank 0's file
CODECS: Final = "codecs"  # what this rank's codecs depend on beside weights
CODES: Final = "codes"  # frames of frozen weights, where they are held as codes
RANDOM: Final = "random"  # generators' states
_NAME: Final = re.compile(r"checkpoint-([0-9]{6,})")
_LEFT: Final = re.compile(r"\.checkpoint-[0-9]{6,}\.(partial|removed)")
_DIGEST: Final = "sha256"  # key of the manifest's own digest, its last


# Ranges


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


def ranges(geometry: UnitGeometry, low: int, high: int, origin: int | None = None) -> Iterator[Range]:
    """What elements [low, high) of a unit hold of its parameters; padding is nobody's.

    Args:
        geometry: of the unit.
        low: first element.
        high: one past the last.
        origin: the element that ``Range.at`` counts from; ``low`` by default.
    """
    for slot in geometry.slots:
        begin, end = max(slot.offset, low), min(slot.end, high)
        if begin < end:
            at = begin - (low if origin is None else origin)
            yield Range(slot, begin - slot.offset, end - slot.offset, at)


def held_ranges(geometry: UnitGeometry, rank: int) -> Iterator[Range]:
    """What ``rank``'s shard holds."""
    return ranges(geometry, *geometry.bounds(rank))


def saved_ranges(geometry: UnitGeometry, rank: int) -> Iterator[Range]:
    """What ``rank`` saves: of groups that hold copies of one another, each a part, so nothing twice."""
    first, _ = geometry.bounds(rank)
    low, high = geometry.own_piece(rank)
    return ranges(geometry, first + low, first + high, first)


def key_of(kind: str, name: str, start: int) -> str:
    """The name, in its file, of the range of ``name`` that begins at ``start``."""
    return f"{kind}/{name}@{start}"


# The manifest


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SavedRange(NamedTuple):
    """Elements [start, end) of a parameter lie in file number ``file``."""

    start: int
    end: int
    file: int


class SavedParameter(_Part):
    """A parameter: its shape, whether it was trained, and where its ranges are, in their order."""

    shape: list[int]
    trainable: bool
    ranges: list[tuple[int, int, int]]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        ends = [0, *(end for _, end, _ in self.ranges)]
        starts = [*(start for start, _, _ in self.ranges), math.prod(self.shape)]
        if starts != ends or any(start >= end for start, end, _ in self.ranges):
            raise ValueError(f"its ranges do not make up its {math.prod(self.shape)} elements")
        return self

    def overlapping(self, start: int, end: int) -> Iterator[SavedRange]:
        """The saved ranges that hold elements of [start, end)."""
        first = bisect.bisect_right(self.ranges, start, key=lambda one: one[1])
        for one in self.ranges[first:]:
            if one[0] >= end:
                return
            yield SavedRange(*one)


class SavedValue(_Part):
    """An entry of the model's state: a parameter, a buffer, or an extra state that is no tensor.

    Attributes:
        name: in the state dict.
        kind: which of them.
        of: the parameter's own name, of which tied ones have one.
        tensor: type, by the name that safetensors gives it, and shape of a buffer.
        value: the extra state.
    """

    name: str
    kind: Literal["parameter", "buffer", "extra"]
    of: str = ""
    tensor: tuple[str, list[int]] | None = None
    value: Any = None


class SavedState(_Part):
    """The optimizer's state of one parameter: numbers, and by name what it has for each element."""

    numbers: dict[str, Any]
    elements: list[str]


class SavedGroup(_Part):
    """A parameter group: its parameters in order, and its options."""

    parameters: list[str]
    options: dict[str, Any]


class SavedOptimizer(_Part):
    """An optimizer: its class, groups, and state by parameter; none for what has not stepped yet."""

    kind: str
    groups: list[SavedGroup]
    state: dict[str, SavedState]


class SavedFile(_Part):
    """A rank's file."""

    name: str
    nbytes: int
    sha256: str


class Manifest(_Part):
    """What a checkpoint holds, and where.

    Attributes:
        format: :data:`FORMAT`.
        version: :data:`VERSION`.
        writer: the program that wrote it.
        step: optimizer steps before it.
        micro_batch: backward passes since; with a loss scale, of steps that were skipped.
        topology: nodes x ranks per node.
        of: what the state of codecs, which only an equal run can take over, belongs to.
        parameters: by their own names.
        state: the entries of the unsharded model's state dict, in its order.
        optimizers: in the order in which they were given.
        loss_scale: how the loss scale moves, and its state; None without one.
        extra: the caller's.
        files: in the order of their numbers: rank 0's first.
    """

    format: str
    version: int
    writer: str
    step: int
    micro_batch: int
    topology: str
    of: dict[str, str]
    parameters: dict[str, SavedParameter]
    state: list[SavedValue]
    optimizers: list[SavedOptimizer]
    loss_scale: tuple[str, dict[str, Any]] | None
    extra: Any
    files: list[SavedFile]

    def text(self) -> str:
        """The file's text: JSON, whose last key is the SHA-256 of the JSON without it."""
        held = self.model_dump(mode="json")
        return json.dumps({**held, _DIGEST: _digest(held)}, indent=1) + "\n"

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(one.shape) for one in self.parameters.values())

    @property
    def nbytes(self) -> int:
        """Of all ranks' files."""
        return sum(file.nbytes for file in self.files)


def _digest(held: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(held, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in folder ``path``.

    Raises:
        CheckpointError: if it is not there, foreign, newer, cut short or altered.
    """
    file = path / MANIFEST
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: not a checkpoint: {MANIFEST}: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{file}: cut short, or not JSON") from None
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise CheckpointError(f"{file}: not a manifest of a {FORMAT}")
    if held.get("version") != VERSION:
        raise CheckpointError(
            f"{file}: version {held.get('version')} of the format; this program reads version {VERSION}"
        )
    if held.pop(_DIGEST, None) != _digest(held):
        raise CheckpointError(f"{file}: altered since it was written: its digest is another")
    try:
        return Manifest.model_validate_json(json.dumps(held))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{file}: {where}: {first['msg']}") from None


def check_names(own: Mapping[str, object], held: Mapping[str, object], what: str) -> None:
    """Refuse a checkpoint, or state, whose names are not the model's.

    Raises:
        CheckpointError: naming the first that differs, and where it is.
    """
    if odd := sorted(own.keys() ^ held.keys()):
        side = "only in the model" if odd[0] in own else "not in the model"
        raise CheckpointError(f"{len(odd)} {what} differ, first {odd[0]!r}, {side}")


# Folders


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first; none if it is not there."""
    found = {int(match[1]): path for path in _inside(folder) if (match := _NAME.fullmatch(path.name))}
    return [found[number] for number in sorted(found)]


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def latest(folder: Path | str) -> Path | None:
    """The newest complete checkpoint in ``folder``; None if there is none."""
    return next(reversed(checkpoints(Path(folder))), None)


def resolve(folder: Path) -> Path:
    """The checkpoint that ``folder`` is, or the newest that it holds.

    Raises:
        CheckpointError: if it is none and holds none.
    """
    if (folder / MANIFEST).exists() or _NAME.fullmatch(folder.name):
        return folder
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(f"{folder}: {'no checkpoint in it' if folder.is_dir() else 'no such folder'}")
    return newest


def partial(path: Path) -> Path:
    """Where the checkpoint ``path`` is written, until it is complete."""
    return path.with_name(f".{path.name}.partial")


def begin(folder: Path) -> Path:
    """Make room for the next checkpoint, and remove what broken saves have left; rank 0 calls it.

    Returns:
        What it will be called; :func:`partial` of it is there now.

    Raises:
        OSError: if that cannot be done.
    """
    for path in _inside(folder):
        if _LEFT.fullmatch(path.name):
            disk.remove_folder(path)
    newest = latest(folder)
    number = 1 if newest is None else int(newest.name.partition("-")[2]) + 1
    path = folder / f"checkpoint-{number:06d}"
    disk.make_folder(partial(path))
    return path


def file_name(rank: int) -> str:
    """What a rank's file is called."""
    return f"rank-{rank:05d}.safetensors"


def commit(path: Path, manifest: Manifest) -> None:
    """Complete a checkpoint whose other files are all on disk; the last step is one rename.

    Raises:
        OSError: if that cannot be done; then it is not complete.
    """
    inside = partial(path)
    with disk.create(inside / MANIFEST) as file:
        disk.write(file, manifest.text().encode())
        disk.sync(file)
    disk.sync_folder(inside)
    disk.rename(inside, path)
    disk.sync_folder(path.parent)


def give_up(path: Path) -> None:
    """Remove what there is of a checkpoint that will not be completed, as far as that can be done."""
    with suppress(OSError):  # the error that led here matters more; the next save tries again
        disk.remove_folder(partial(path))


def thin(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the ``keep`` newest; each leaves its name first, whole.

    Raises:
        OSError: if that cannot be done.
    """
    for path in checkpoints(folder)[:-keep]:
        gone = path.with_name(f".{path.name}.removed")
        disk.rename(path, gone)
        disk.sync_folder(folder)
        disk.remove_folder(gone)


# Reading


def verify(path: Path, files: Iterable[SavedFile]) -> None:
    """Make sure that files are those that the manifest speaks of.

    Raises:
        CheckpointError: naming the first that is missing, cut short or altered.
    """
    for file in files:
        found = digest_of(path / file.name)
        if found.nbytes != file.nbytes:
            raise CheckpointError(
                f"{path / file.name}: {found.nbytes} bytes, the manifest says {file.nbytes}"
            )
        if found.sha256 != file.sha256:
            raise CheckpointError(f"{path / file.name}: altered since it was written: its digest is another")


class Parts:
    """The files of a checkpoint, to be read by ranges of parameters; a context that closes them.

    Args:
        path: the checkpoint's folder.
        manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._readers: dict[int, Reader] = {}

    def file(self, number: int) -> Reader:
        """One file.

        Raises:
            CheckpointError: if there is none of that number, or it cannot be read.
        """
        if not 0 <= number < len(self._manifest.files):
            raise CheckpointError(f"{self._path}: has no file {number}, of {len(self._manifest.files)}")
        if number not in self._readers:
            self._readers[number] = Reader(self._path / self._manifest.files[number].name)
        return self._readers[number]

    def read(self, kind: str, name: str, start: int, end: int) -> Iterator[tuple[int, Entry, bytearray]]:
        """Elements [start, end) of a parameter: (offset from ``start``, entry, bytes) of each run.

        Raises:
            CheckpointError: for a parameter or kind that was not saved.
        """
        for saved in self._manifest.parameters[name].overlapping(start, end):
            key = key_of(kind, name, saved.start)
            first, last = max(start, saved.start), min(end, saved.end)
            reader = self.file(saved.file)
            entry = reader.entry(key)
            yield first - start, entry, reader.read(key, first - saved.start, last - saved.start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def layout_digest(geometries: Sequence[UnitGeometry]) -> str:
    """Says whether two runs lay their units out alike."""
    return hashlib.sha256(repr(list(geometries)).encode()).hexdigest()[:16]


def saved_parameters(geometries: Sequence[UnitGeometry], topology_world: int) -> dict[str, SavedParameter]:
    """What all ranks save of all parameters, as any of them can tell from the layout."""
    found: dict[str, list[tuple[int, int, int]]] = {
        slot.spec.name: [] for geometry in geometries for slot in geometry.slots
    }
    for geometry in geometries:
        for rank in range(topology_world):
            for one in saved_ranges(geometry, rank):
                found[one.name].append((one.start, one.end, rank))
    return {
        slot.spec.name: SavedParameter(
            shape=list(slot.spec.shape),
            trainable=geometry.trainable,
            ranges=sorted(found[slot.spec.name]),
        )
        for geometry in geometries
        for slot in geometry.slots
    }
