"""The manifest of a checkpoint: what it says, and how its text is written, read and checked.

Pure: no torch.  The unit of saving is a *range*: elements [start, end) of one parameter, flattened.
Ranges know nothing of units, blocks, shards or ranks, so any layout can read those of any other
(:mod:`impl.checkpoint.resharding`).  docs/guide/checkpoints.md describes the files byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.json_values import from_json
from impl.checkpoint.safetensors_file import Entry
from impl.strict_json import parsed

FORMAT: Final = "zeropp checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
# Kinds of entries of a rank's file, the part of their names before the first "/".
WEIGHT: Final = "weight"  # fp32, by range; optimizers' states beside it
BUFFER: Final = "buffer"  # in rank 0's file
CODECS: Final = "codecs"  # what this rank's codecs depend on beside weights
CODES: Final = "codes"  # frames of frozen weights, where they are held as codes
RANDOM: Final = "random"  # generators' states
_DIGEST: Final = "sha256"  # key of the manifest's own digest, its last


def key_of(kind: str, name: str, start: int) -> str:
    """The name, in its file, of the range of ``name`` that begins at ``start``."""
    return f"{kind}/{name}@{start}"


def file_name(rank: int) -> str:
    """What a rank's file is called."""
    return f"rank-{rank:05d}.safetensors"


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
