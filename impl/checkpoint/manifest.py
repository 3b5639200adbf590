"""Reads and verifies a checkpoint's manifest, the file that says what was saved and in which files.

docs/guide/checkpoints.md describes the manifest.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from impl import regular_file
from impl.checkpoint.commit import MANIFEST, CheckpointError, digest_of

FORMAT: Final = "zeropp checkpoint"
VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint: what was saved, and in which files.

    docs/guide/checkpoints.md explains the fields.
    """

    writer: str
    step: int
    micro_batch: int
    topology: str
    of: dict[str, str]
    state: dict[str, dict[str, Any]]
    optimizers: list[dict[str, Any]]
    loss_scale: dict[str, Any] | None
    extra: Any
    files: list[tuple[int, str]]

    @property
    def parameters(self) -> dict[str, list[int]]:
        """The shape of each parameter, by name."""
        return {e["parameter"]: e["shape"] for e in self.state.values() if "parameter" in e}

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(map(math.prod, self.parameters.values()))

    def text(self) -> str:
        """Returns the text of the manifest's file: JSON, with a last key ``sha256`` that protects all other keys.

        The value of ``sha256`` is the SHA-256 of the JSON of all other keys.
        """
        fields = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**fields, "sha256": digest(fields)}, indent=1) + "\n"

    def verify(self, path: Path, numbers: Collection[int]) -> None:
        """Check the sizes of all ranks' files in the folder ``path``, and hash some of the files.

        ``numbers`` are the ranks whose files are hashed.  The SHA-256 of these files must equal the manifest's.  Each
        rank may pass other numbers, so that ranks share the work.

        Raises CheckpointError: if a file is missing or was altered.  The message names the first such file.
        """
        for number, (nbytes, sha256) in enumerate(self.files):
            file = path / file_name(number)
            try:
                if (size := regular_file.status(file).st_size) != nbytes:
                    raise CheckpointError(
                        f"{file}: has {size} bytes, but {nbytes} according to the manifest: load another checkpoint"
                    )
                if number in numbers and digest_of(file)[1] != sha256:
                    raise CheckpointError(
                        f"{file}: was altered since it was written: its digest differs; load another checkpoint"
                    )
            except OSError as error:
                raise CheckpointError(
                    f"{file}: cannot be read: {error.strerror}; load another checkpoint"
                ) from None


def file_name(rank: int) -> str:
    """Returns the name of the file into which ``rank`` saves its tensors, such as ``rank-00003.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def digest(fields: Mapping[str, Any]) -> str:
    """Returns the SHA-256, in hexadecimal digits, of ``fields`` as compact JSON."""
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint in folder ``path``.

    Raises CheckpointError: if the file is missing, is not a manifest of this version, or was altered.
    """
    file = path / MANIFEST
    try:
        fields = json.loads(regular_file.read_text(file))
    except OSError as error:
        raise CheckpointError(
            f"{path}: is not a checkpoint: {MANIFEST}: {error.strerror}; name a folder that save() or zeropp train "
            "has written"
        ) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file}: is cut short, or is not JSON: load another checkpoint") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(
            f"{file}: is not a manifest of a {FORMAT}: name a folder that save() or zeropp train has written"
        )
    if (version := fields.get("version")) != VERSION:
        raise CheckpointError(
            f"{file}: has version {version!r} of the format, but this program reads version {VERSION}: load the "
            "checkpoint with the release that saved it"
        )
    if fields.pop("sha256", None) != digest(fields):
        raise CheckpointError(
            f"{file}: was altered since it was written: its digest differs; load another checkpoint"
        )
    content = {name: value for name, value in fields.items() if name not in ("format", "version")}
    if (fault := _fault(content)) is not None:
        raise CheckpointError(f"{file}: is not a manifest of a {FORMAT}: {fault}; load another checkpoint")
    return Manifest(**content)


def _fault(content: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a manifest's ``content``, as text for an error; None if nothing is wrong.

    There are three kinds of faults: a key is missing or unknown; a value has another form than
    docs/guide/checkpoints.md describes; or the parameters have more elements than the files have bytes.
    """
    known = [field.name for field in dataclasses.fields(Manifest)]
    if different := sorted(content.keys() ^ set(known)):
        return f"key {different[0]!r} is {'missing' if different[0] in known else 'unknown'}"
    right: dict[str, Callable[[Any], bool]] = {
        "writer": lambda value: isinstance(value, str),
        "step": _is_count,
        "micro_batch": _is_count,
        "topology": lambda value: isinstance(value, str),
        "of": lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
        "state": lambda value: isinstance(value, dict) and all(map(_is_entry, value.values())),
        "optimizers": lambda value: isinstance(value, list) and all(map(_is_optimizer, value)),
        "loss_scale": lambda value: value is None or (isinstance(value, dict) and "setting" in value),
        "files": lambda value: isinstance(value, list) and all(map(_is_file, value)),
    }
    for name, is_right in right.items():
        if not is_right(content[name]):
            return f"{name} has another form than docs/guide/checkpoints.md describes"
    elements = Manifest(**content).numel
    if elements > (held := sum(size for size, _ in content["files"])):
        return f"its parameters have {elements:,} elements, but its files only {held:,} bytes"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_entry(value: Any) -> bool:
    """Return whether ``value`` describes an entry of the state dict: a parameter, a buffer or an extra state."""
    if not isinstance(value, dict) or len(value.keys() & {"parameter", "buffer", "extra"}) != 1:
        return False
    if "extra" in value:
        return True
    shape = value.get("shape")
    return (
        isinstance(value.get("parameter", value.get("buffer")), str)
        and isinstance(shape, list)
        and all(map(_is_count, shape))
        and math.prod(shape) < 2**63
    )


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("kind"), str)


def _is_file(value: Any) -> bool:
    """Return whether ``value`` has the form ``[size in bytes, SHA-256 in hexadecimal digits]``; no file is read."""
    return isinstance(value, list) and len(value) == 2 and _is_count(value[0]) and isinstance(value[1], str)


def check_names(model_names: Collection[str], saved_names: Collection[str], kind: str) -> None:
    """Raise CheckpointError unless ``model_names`` and ``saved_names`` are the same.

    The message gives the number of names that only the model or only the checkpoint has, and the first of these names.
    ``kind`` says in the message what the names belong to, such as ``parameters of optimizer 0``.
    """
    if different := sorted(set(model_names) ^ set(saved_names)):
        side = "only in the model" if different[0] in model_names else "only in the checkpoint"
        raise CheckpointError(
            f"the model and the checkpoint have different {kind} (differences: {len(different)}), for example "
            f"{different[0]!r}, which is {side}: load the checkpoint with the model that was saved"
        )
