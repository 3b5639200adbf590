"""Whole state dicts: out of a checkpoint on one process, out of a sharded model, and into one.

Reading a checkpoint needs neither ranks nor the model, and no more memory than its largest tensor.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from impl.checkpoint import atomic_files as disk
from impl.checkpoint import safetensors_file
from impl.checkpoint.all_ranks import together
from impl.checkpoint.atomic_files import Bytes, CheckpointError
from impl.checkpoint.commit import resolve, verify
from impl.checkpoint.json_values import from_json, to_json
from impl.checkpoint.manifest import WEIGHT, check_names, read_manifest
from impl.checkpoint.resharding import Parts, Range
from impl.checkpoint.safetensors_file import Entry, Reader
from impl.checkpoint.save_load import take_weights
from impl.checkpoint.tensor_bytes import NAMES, content, entry_of
from impl.engine import state_dict as state
from impl.unit.whole_values import WholeValues
from impl.zero import Zero

_EXTRA: Final = "extra_state"  # key of the file's metadata: extra states of modules, as JSON
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def consolidated(folder: Path | str) -> dict[str, Any]:
    """The unsharded model's state dict out of a checkpoint; ``load_state_dict(strict=True)`` takes it.

    Args:
        folder: a checkpoint, or a folder of them, of which the newest is taken.

    Returns:
        fp32 parameters, tied ones under all their names, buffers and extra states.

    Raises:
        CheckpointError: if it is missing, foreign, newer, cut short or altered.
    """
    parts = _opened(folder)
    parameter = functools.cache(functools.partial(_parameter, parts))  # tied ones are one tensor
    found: dict[str, Any] = {}
    for one in parts.manifest.state:
        if one.kind == "extra":
            found[one.name] = from_json(one.value)
        else:
            found[one.name] = parameter(one.of) if one.kind == "parameter" else parts.buffer(one.name)
    return found


def export(source: Path | str | Zero, path: Path | str, *, dtype: torch.dtype = torch.float32) -> None:
    """Write the unsharded model's state as one safetensors file, tied parameters under all their names.

    Args:
        source: a checkpoint, or a folder of them, of which the newest is taken; or an engine, whose ranks
            must all call it: then rank 0 writes, one unit in memory at a time.
        path: of the file, which must not be there.
        dtype: of the parameters; buffers keep theirs.

    Raises:
        CheckpointError: if the checkpoint cannot be read, or the file not be written; of an engine on all
            ranks.
    """
    path = Path(path)
    if isinstance(source, Zero):
        _export_engine(source, path, dtype)
    else:
        _export_checkpoint(source, path, dtype)


def _export_checkpoint(source: Path | str, path: Path, dtype: torch.dtype) -> None:
    _check_target(path, dtype)
    parts = _opened(source)
    manifest = parts.manifest
    tensors = [one for one in manifest.state if one.kind != "extra"]
    extras = {one.name: one.value for one in manifest.state if one.kind == "extra"}
    entries = {
        one.name: one.entry or Entry(NAMES[dtype], tuple(manifest.parameters[one.of].shape))
        for one in tensors
    }
    contents = (
        content(_parameter(parts, one.of).to(dtype) if one.kind == "parameter" else parts.buffer(one.name))
        for one in tensors
    )
    try:
        _write(path, entries, contents, extras)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def _export_engine(zero: Zero, path: Path, dtype: torch.dtype) -> None:
    zero.buffers.make_equal()
    writes = zero.wire.mesh.rank == 0
    together(zero.wire, lambda: _check_target(path, dtype) if writes else None)
    own = state.parameter_names(zero.model, zero.units)
    names: dict[str, list[str]] = {}
    for name, parameter in own.items():
        names.setdefault(parameter, []).append(name)
    entries = {
        name: Entry(NAMES[dtype], slot.spec.shape)
        for unit in zero.units
        for slot in unit.geometry.slots
        for name in names[slot.spec.name]
    }
    rest = {name: held for name, held in zero.model.state_dict(keep_vars=True).items() if name not in own}
    tensors = {name: held for name, held in rest.items() if isinstance(held, Tensor)}

    def contents() -> Iterator[Bytes]:
        for unit in zero.units:
            for slot, value in zip(unit.geometry.slots, WholeValues(unit).masters(), strict=True):
                for _ in names[slot.spec.name]:
                    yield content(value.to(dtype))
        yield from map(content, tensors.values())

    values = contents()

    def write() -> None:
        try:
            if writes:
                described = entries | {name: entry_of(held, name) for name, held in tensors.items()}
                extras = {name: to_json(held, name) for name, held in rest.items() if name not in tensors}
                _write(path, described, values, extras)
        finally:
            for _ in values:  # the other ranks count on this one, whatever its disk says
                pass

    together(zero.wire, write)


def _check_target(path: Path, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise CheckpointError(f"dtype {dtype}: expected one of {', '.join(map(str, _FLOATS))}")
    if path.exists():
        raise CheckpointError(f"{path}: is there already")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: no such folder")


def _write(
    path: Path, entries: Mapping[str, Entry], contents: Iterator[Bytes], extras: Mapping[str, Any]
) -> None:
    """A whole file in its place, or none."""
    unfinished = path.with_name(f".{path.name}.partial")
    unfinished.unlink(missing_ok=True)
    metadata = {"format": "pt"}  # by which other readers know torch's tensors
    if extras:
        metadata[_EXTRA] = json.dumps(dict(extras))
    try:
        safetensors_file.write(unfinished, entries, contents, metadata)
        disk.rename(unfinished, path)
        disk.sync_folder(path.parent)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def import_(source: Path | str | Mapping[str, Any], zero: Zero) -> None:
    """Overwrite weights and buffers with an unsharded model's; all ranks call it.

    Each rank reads its own ranges alone.

    Args:
        source: a safetensors file, or a state dict, equal on all ranks.  Of tied parameters one name is
            enough.
        zero: the engine.

    Raises:
        CheckpointError: on all ranks, for missing, unexpected or misshapen entries; nothing is changed
            then.
    """
    held: dict[str, Any] = {}

    def find() -> None:
        zero.hooks.backward.check_finished("import_()")
        zero.check_hidden("import_()")
        held.update(source if isinstance(source, Mapping) else _stored(Path(source)))
        _check_fits(zero, held)

    def take() -> None:
        own = state.parameter_names(zero.model, zero.units)
        names = {parameter: name for name, parameter in own.items() if name in held}

        def read(one: Range) -> Iterator[tuple[int, Tensor]]:
            value = held[names[one.name]]
            flat = value if isinstance(value, _Stored) else value.detach().reshape(-1)
            yield 0, flat[one.start : one.end]

        take_weights(zero, read)
        for name, entry in zero.model.state_dict(keep_vars=True).items():
            if name not in own:
                value = held[name]
                value = value.reader.tensor(name) if isinstance(value, _Stored) else value
                state.load_entry(zero.model, name, entry, value)

    together(zero.wire, find)
    together(zero.wire, take)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a file, of which ranges are read."""

    reader: Reader
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.entry(self.name).shape

    def __getitem__(self, within: slice) -> Tensor:
        return self.reader.read(self.name, within.start, within.stop)


def _stored(path: Path) -> dict[str, Any]:
    """A file's state dict, whose tensors are not read yet."""
    reader = Reader(path)
    extras: dict[str, Any] = from_json(json.loads(reader.metadata.get(_EXTRA, "{}")))
    return {name: _Stored(reader, name) for name in reader.entries} | extras


def _check_fits(zero: Zero, held: Mapping[str, Any]) -> None:
    """Refuse a state dict that is not the model's; of tied parameters one name is enough."""
    own = state.parameter_names(zero.model, zero.units)
    given = {own[name] for name in held if name in own}
    entries = dict(zero.model.state_dict(keep_vars=True))
    needed = {name: entry for name, entry in entries.items() if own.get(name) not in given or name in held}
    check_names(needed, held, "entries of the state dict")
    for name, entry in needed.items():
        if isinstance(entry, Tensor) and not state.is_extra(name):
            shape = tuple(held[name].shape) if isinstance(held[name], Tensor | _Stored) else None
            if shape != tuple(entry.shape):
                raise CheckpointError(f"{name!r} is {shape} in it, {tuple(entry.shape)} in the model")


def _opened(folder: Path | str) -> Parts:
    """A checkpoint whose files are all as they were written."""
    path = resolve(Path(folder))
    manifest = read_manifest(path)
    verify(path, manifest.files)
    return Parts(path, manifest)


def _parameter(parts: Parts, name: str) -> Tensor:
    whole = torch.empty(parts.manifest.parameters[name].shape)
    flat = whole.view(-1)
    for offset, values in parts.read(WEIGHT, name, 0, flat.numel()):
        flat[offset : offset + len(values)] = values
    return whole
