"""The manifest of a checkpoint, which docs/guide/checkpoints.md describes.  No torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from impl.checkpoint.commit import MANIFEST, CheckpointError, digest_of

FORMAT: Final = "zeropp checkpoint"
VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds, and where: the keys of docs/guide/checkpoints.md."""

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
        """Shapes by name of the parameter."""
        return {e["parameter"]: e["shape"] for e in self.state.values() if "parameter" in e}

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(map(math.prod, self.parameters.values()))

    def text(self) -> str:
        """The file's text: JSON, whose last key is the SHA-256 of the JSON without it."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**fields, "sha256": digest(fields)}, indent=1) + "\n"

    def verify(self, path: Path, numbers: Collection[int]) -> None:
        """Refuse missing or shortened files in ``path``, and altered ones of the ranks ``numbers``."""
        for number, (nbytes, sha256) in enumerate(self.files):
            file = path / file_name(number)
            try:
                if (size := file.stat().st_size) != nbytes:
                    raise CheckpointError(f"{file}: {size} bytes, the manifest says {nbytes}")
                if number in numbers and digest_of(file)[1] != sha256:
                    raise CheckpointError(f"{file}: altered since it was written: its digest is another")
            except OSError as error:
                raise CheckpointError(f"{file}: {error.strerror}") from None


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def digest(fields: Mapping[str, Any]) -> str:
    """SHA-256 in hex of ``fields`` as compact JSON."""
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in folder ``path``; refuses other files, and altered ones."""
    file = path / MANIFEST
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: not a checkpoint: {MANIFEST}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file}: cut short, or not JSON") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(f"{file}: not a manifest of a {FORMAT}")
    if (version := fields.get("version")) != VERSION:
        raise CheckpointError(
            f"{file}: version {version!r} of the format; this program reads version {VERSION}"
        )
    if fields.pop("sha256", None) != digest(fields):
        raise CheckpointError(f"{file}: altered since it was written: its digest is another")
    return Manifest(**{name: value for name, value in fields.items() if name not in ("format", "version")})


def check_names(model_names: Collection[str], saved_names: Collection[str], kind: str) -> None:
    """Refuse a checkpoint whose names are not the model's, naming the first that differs."""
    if different := sorted(set(model_names) ^ set(saved_names)):
        side = "only in the model" if different[0] in model_names else "not in the model"
        raise CheckpointError(f"{len(different)} {kind} differ, first {different[0]!r}, {side}")
