"""A checkpoint as files: where each rank's ranges lie, the manifest, and the rename that completes it.

Pure: no torch.  The unit of saving is a *range*: elements [start, end) of one parameter, flattened.
Ranges know nothing of units, blocks, shards or ranks, so any layout can read those of any other.
docs/guide/checkpoints.md describes the files byte by byte.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
import math
import re
import secrets
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from impl.checkpoint import atomic_files as disk
from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.json_values import from_json
from impl.checkpoint.ranges import saved_ranges
from impl.checkpoint.safetensors_file import Entry, Reader, digest_of
from impl.plan.geometry import UnitGeometry
from impl.strict_json import parsed

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

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
_LEFT: Final = re.compile(r"\.checkpoint-([0-9]{6,})\.[0-9a-f]+\.(partial|removed)")
_DIGEST: Final = "sha256"  # key of the manifest's own digest, its last


def key_of(kind: str, name: str, start: int) -> str:
    """The name, in its file, of the range of ``name`` that begins at ``start``."""
    return f"{kind}/{name}@{start}"


# The manifest


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Line = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]  # shown as it is: printable


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SavedParameter(_Part):
    """A parameter: its shape, whether it was trained, and where its ranges are, in their order."""

    shape: list[Count]
    trainable: bool
    ranges: list[tuple[Count, Count, Count]]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if math.prod(size for size in self.shape if size) >= 1 << 63:
            raise ValueError("it has too many elements")
        ends = [0, *(end for _, end, _ in self.ranges)]
        starts = [*(start for start, _, _ in self.ranges), math.prod(self.shape)]
        if starts != ends or any(start >= end for start, end, _ in self.ranges):
            raise ValueError(f"its ranges do not make up its {math.prod(self.shape)} elements")
        return self

    def overlapping(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The saved ranges that hold elements of [start, end)."""
        first = bisect.bisect_right(self.ranges, start, key=lambda one: one[1])
        return itertools.takewhile(lambda one: one[0] < end, self.ranges[first:])


class SavedValue(_Part):
    """An entry of the state dict: a parameter, a buffer, or an extra state that is no tensor.

    Attributes:
        of: the parameter's own name, of which tied ones have one.
        tensor: of a buffer, its type, by the name that safetensors gives it, and shape.
    """

    name: str
    kind: Literal["parameter", "buffer", "extra"]
    of: str = ""
    tensor: tuple[str, list[Count]] | None = None
    value: Any = None

    @property
    def entry(self) -> Entry | None:
        """A buffer's type and shape."""
        return None if self.tensor is None else Entry(self.tensor[0], tuple(self.tensor[1]))


class SavedState(_Part):
    """The optimizer's state of one parameter: numbers, and by name what it has for each element."""

    numbers: dict[str, Any]
    elements: list[str]


class SavedGroup(_Part):
    """Parameters in order, that share options, of one group of the engine, by its number."""

    number: int
    parameters: list[str]
    options: dict[str, Any]


class SavedOptimizer(_Part):
    """An optimizer: its class, groups, and state by parameter; none for what has not stepped yet."""

    kind: Line
    groups: list[SavedGroup]
    state: dict[str, SavedState]


class SavedFile(_Part):
    """A rank's file."""

    name: str
    nbytes: Count
    sha256: str


class SavedScale(_Part):
    """The loss scale: how it moves, and what a resumed run goes on with."""

    setting: Line
    scale: float = Field(gt=0, allow_inf_nan=False)
    skipped: Count
    since: Count


class Manifest(_Part):
    """What a checkpoint holds, and where; docs/guide/checkpoints.md says it key by key.

    Attributes:
        micro_batch: backward passes since ``step``; with a loss scale, of steps that were skipped.
        of: what the state of codecs, which only an equal run can take over, belongs to.
        files: in the order of their numbers: rank 0's first.
    """

    format: str
    version: int
    writer: Line
    step: Count
    micro_batch: Count
    topology: Line
    of: dict[str, Line]
    parameters: dict[str, SavedParameter]
    state: list[SavedValue]
    optimizers: list[SavedOptimizer]
    loss_scale: SavedScale | None
    extra: Any
    files: list[SavedFile]

    def check(self) -> None:
        """Refuse what no save writes, before any of it is used.

        Raises:
            CheckpointError: naming what.
        """
        for number, file in enumerate(self.files):
            if file.name != file_name(number):
                raise CheckpointError(f"file {number} is {file.name!r}, expected {file_name(number)}")
        held = Counter[int]()
        for one in self.parameters.values():
            for start, end, number in one.ranges:
                held[number] += (end - start) * 4  # fp32
        for number, nbytes in held.items():
            if number >= len(self.files) or nbytes > self.files[number].nbytes:
                raise CheckpointError(f"{nbytes} bytes of parameters do not fit into file {number}")
        for name, count in Counter(one.name for one in self.state).items():
            if count > 1:
                raise CheckpointError(f"state: {name!r} comes {count} times")
        for value in self.state:
            if value.kind == "parameter" and value.of not in self.parameters:
                raise CheckpointError(f"state: {value.name!r} is of {value.of!r}, which is no parameter")
            if (value.kind == "buffer") != (value.entry is not None):
                raise CheckpointError(f"state: {value.name!r} is {value.kind}, with tensor {value.tensor}")
            from_json(value.value)
        from_json(self.extra)

    def text(self) -> str:
        """The file's text: JSON, whose last key is the SHA-256 of the JSON without it."""
        held = self.model_dump(mode="json")
        return json.dumps({**held, _DIGEST: _digest(held)}, indent=1) + "\n"

    def digest(self) -> str:
        """SHA-256 of all that it says."""
        return _digest(self.model_dump(mode="json"))

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(one.shape) for one in self.parameters.values())


def _digest(held: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(held, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in folder ``path``.

    Raises:
        CheckpointError: if it is not there, foreign, newer, cut short or altered.
    """
    file = path / MANIFEST
    try:
        return _manifest(file)
    except OSError as error:
        raise CheckpointError(f"{path}: not a checkpoint: {MANIFEST}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) if str(part).isprintable() else repr(part) for part in first["loc"])
        raise CheckpointError(f"{file}: {where}: {first['msg']}") from None
    except ValueError:
        raise CheckpointError(f"{file}: cut short, or not JSON") from None
    except RecursionError:
        raise CheckpointError(f"{file}: nested too deep") from None
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _manifest(file: Path) -> Manifest:
    """What ``file`` says, checked."""
    if not stat.S_ISREG(file.lstat().st_mode):
        raise CheckpointError("not a regular file")
    held = parsed(file.read_text(encoding="utf-8"))
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise CheckpointError(f"not a manifest of a {FORMAT}")
    if held.get("version") != VERSION:
        raise CheckpointError(
            f"version {held.get('version')!r} of the format; this program reads version {VERSION}"
        )
    if held.pop(_DIGEST, None) != _digest(held):
        raise CheckpointError("altered since it was written: its digest is another")
    manifest = Manifest.model_validate_json(json.dumps(held))
    manifest.check()
    return manifest


def check_names(own: Collection[str], held: Collection[str], what: str) -> None:
    """Refuse a checkpoint, or state, whose names are not the model's.

    Raises:
        CheckpointError: naming the first that differs, and where it is.
    """
    if odd := sorted(set(own) ^ set(held)):
        side = "only in the model" if odd[0] in own else "not in the model"
        raise CheckpointError(f"{len(odd)} {what} differ, first {odd[0]!r}, {side}")


# Folders


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first; none if it is not there."""
    return [path for path in named(folder) if (path / MANIFEST).is_file()]


def named(folder: Path) -> list[Path]:
    """What has a checkpoint's name in ``folder``, oldest first: broken, if it is not complete.

    A save gives that name last, and removing one takes it first.
    """
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
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder}: is a file; expected a folder of checkpoints, or a checkpoint: "
            f"a folder with a {MANIFEST}"
        )
    if (folder / MANIFEST).exists() or _NAME.fullmatch(folder.name):
        return folder
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(f"{folder}: {'no checkpoint in it' if folder.is_dir() else 'no such folder'}")
    return newest


class Begun(NamedTuple):
    """A checkpoint under way: its folder for now, and on rank 0 the lock that says so, for its life."""

    partial: Path
    lock: disk.Lock | None

    def release(self) -> None:
        """It is complete, or given up."""
        if self.lock is not None:
            self.lock.release()


def begin(folder: Path) -> Begun:
    """Make room for the next checkpoint, and remove what broken saves have left; rank 0 calls it.

    What others are saving here now, in this process or another, is left alone, and has another number.

    Raises:
        OSError: if that cannot be done.
    """
    with suppress(FileExistsError):
        disk.make_folder(folder)
    turn = disk.Lock(folder, wait=True)  # nobody else begins, or clears, meanwhile
    try:
        taken = [
            int(match[1])
            for path in _inside(folder)
            if (match := _NAME.fullmatch(path.name))
            or ((match := _LEFT.fullmatch(path.name)) and not _cleared(path))
        ]
        partial = folder / f".checkpoint-{max(taken, default=0) + 1:06d}.{secrets.token_hex(4)}.partial"
        disk.make_folder(partial)
        return Begun(partial, disk.Lock(partial, wait=False))
    finally:
        turn.release()


def _cleared(path: Path) -> bool:
    """Whether what a save has left is gone; not if the save goes on, or it cannot be removed."""
    try:
        if path.is_dir() and not path.is_symlink():
            lock = disk.Lock(path, wait=False)
            lock.release()
            if not lock.real:
                _log.warning("%s: may be of a save under way, as locks are missing here: left alone", path)
                return False
        disk.remove_folder(path)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning("%s: left by a save, and cannot be removed: %s", path, error.strerror)
        return False
    return True


def complete_name(partial: Path) -> Path:
    """What the checkpoint that is written at ``partial`` will be called."""
    return partial.with_name(partial.name.split(".")[1])


def file_name(rank: int) -> str:
    """What a rank's file is called."""
    return f"rank-{rank:05d}.safetensors"


def commit(partial: Path, manifest: Manifest) -> Path:
    """Complete a checkpoint whose other files are all on disk, by one rename; returns its folder.

    Raises:
        OSError: if that cannot be done; then it is not complete.
        CheckpointError: if the files are not those that were written, or its name is taken.
    """
    path = complete_name(partial)
    for written in manifest.files:
        check_size(partial, written)
    if path.exists():
        raise CheckpointError(f"{path}: is there already: another run saves into this folder")
    with disk.create(partial / MANIFEST) as file:
        disk.write(file, manifest.text().encode())
        disk.sync(file)
    disk.sync_folder(partial)
    disk.rename(partial, path)
    disk.sync_folder(path.parent)
    return path


def give_up(partial: Path) -> None:
    """Remove what there is of a checkpoint that will not be completed, as far as that can be done."""
    with suppress(OSError):  # the error that led here matters more; the next save tries again
        disk.remove_folder(partial)


def thin(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the ``keep`` newest; each leaves its name first, whole.

    Of a link the name goes alone.  What cannot be removed is logged: the new checkpoint is there.
    """
    for path in checkpoints(folder)[:-keep]:
        try:
            gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
            disk.rename(path, gone)
            disk.sync_folder(folder)
            disk.remove_folder(gone)
        except FileNotFoundError:  # another save removes it
            continue
        except OSError as error:
            _log.warning("%s: older than the %d to be kept, and stays: %s", path, keep, error.strerror)


# Reading


def verify(path: Path, files: Iterable[SavedFile]) -> None:
    """Make sure that files are those that the manifest speaks of.

    Raises:
        CheckpointError: naming the first that is missing, cut short or altered.
    """
    for file in files:
        check_size(path, file)
        found = digest_of(path / file.name)
        if found.sha256 != file.sha256:
            raise CheckpointError(f"{path / file.name}: altered since it was written: its digest is another")


def check_size(path: Path, file: SavedFile) -> None:
    """Refuse a file that is not one, or of another size than the manifest says.

    Raises:
        CheckpointError: naming it.
    """
    try:
        found = (path / file.name).lstat()
    except OSError as error:
        raise CheckpointError(f"{path / file.name}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path / file.name}: not a regular file")
    if found.st_size != file.nbytes:
        raise CheckpointError(f"{path / file.name}: {found.st_size} bytes, the manifest says {file.nbytes}")


class Parts:
    """The files of a checkpoint in folder ``path``, to be read by ranges of parameters."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self.manifest = path, manifest
        self._readers: dict[int, Reader] = {}

    def file(self, number: int) -> Reader:
        """One file.

        Raises:
            CheckpointError: if it cannot be read.
        """
        if number not in self._readers:
            self._readers[number] = Reader(self._path / self.manifest.files[number].name)
        return self._readers[number]

    def buffer(self, name: str) -> Tensor:
        """A buffer, or an extra state that is a tensor, in its shape."""
        return self.file(0).tensor(f"{BUFFER}/{name}")

    def dtype(self, kind: str, name: str) -> str:
        """The type of what was saved of a parameter that has elements."""
        start, _, number = self.manifest.parameters[name].ranges[0]
        return self.file(number).entry(key_of(kind, name, start)).dtype

    def read(self, kind: str, name: str, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Elements [start, end) of a parameter: (offset from ``start``, values) of each run.

        Raises:
            CheckpointError: for a parameter or kind that was not saved.
        """
        for low, high, number in self.manifest.parameters[name].overlapping(start, end):
            first, last = max(start, low), min(end, high)
            yield first - start, self.file(number).read(key_of(kind, name, low), first - low, last - low)


def saved_parameters(geometries: Sequence[UnitGeometry], topology_world: int) -> dict[str, SavedParameter]:
    """What all ranks save of all parameters, as any of them can tell from the layout."""
    found: dict[str, SavedParameter] = {}
    for geometry in geometries:
        ranges: dict[str, list[tuple[int, int, int]]] = {slot.spec.name: [] for slot in geometry.slots}
        for rank in range(topology_world):
            for one in saved_ranges(geometry, rank):
                ranges[one.name].append((one.start, one.end, rank))
        for slot in geometry.slots:
            name, shape = slot.spec.name, list(slot.spec.shape)
            found[name] = SavedParameter(
                shape=shape, trainable=geometry.trainable, ranges=sorted(ranges[name])
            )
    return found
