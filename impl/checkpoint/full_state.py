"""Whole state dicts: out of a checkpoint on one process, out of a sharded model, and into one.

Reading a checkpoint needs neither ranks nor the model, and no more memory than its largest tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from impl.checkpoint import atomic_files as disk
from impl.checkpoint import safetensors_file
from impl.checkpoint.all_ranks import together
from impl.checkpoint.atomic_files import Bytes, CheckpointError
from impl.checkpoint.json_values import from_json, to_json
from impl.checkpoint.manifest import (
    BUFFER,
    WEIGHT,
    Manifest,
    Parts,
    check_names,
    read_manifest,
    resolve,
    verify,
)
from impl.checkpoint.ranges import held_ranges
from impl.checkpoint.safetensors_file import Entry, Reader
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
    path, manifest = _opened(folder)
    found: dict[str, Any] = {}
    tied: dict[str, Tensor] = {}
    with Parts(path, manifest) as parts:
        for one in manifest.state:
            if one.kind == "parameter":
                if one.of not in tied:
                    tied[one.of] = _parameter(manifest, parts, one.of)
                found[one.name] = tied[one.of]
            elif one.kind == "buffer":
                found[one.name] = _buffer(parts, one.name)
            else:
                found[one.name] = from_json(one.value)
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
    folder, manifest = _opened(source)
    with Parts(folder, manifest) as parts:
        entries, extras = {}, {}
        for one in manifest.state:
            if one.kind == "parameter":
                entries[one.name] = Entry(NAMES[dtype], tuple(manifest.parameters[one.of].shape))
            elif one.kind == "buffer":
                entries[one.name] = parts.file(0).entry(f"{BUFFER}/{one.name}")
            else:
                extras[one.name] = one.value
        contents = (
            content(
                _parameter(manifest, parts, one.of).to(dtype)
                if one.kind == "parameter"
                else _buffer(parts, one.name)
            )
            for one in manifest.state
            if one.kind != "extra"
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

    def contents() -> Iterator[Bytes]:
        for unit in zero.units:
            for slot, value in zip(unit.geometry.slots, WholeValues(unit).masters(), strict=True):
                for _ in names[slot.spec.name]:
                    yield content(value.to(dtype))
        for held in rest.values():
            if isinstance(held, Tensor):
                yield content(held)

    values = contents()

    def write() -> None:
        try:
            if writes:
                tensors = {name: held for name, held in rest.items() if isinstance(held, Tensor)}
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
    wire = zero.wire
    held: list[_Source] = []

    def find() -> None:
        zero.hooks.backward.check_finished("import_()")
        zero.check_hidden("import_()")
        held.append(_Source(source))
        held[0].check(zero)

    def take() -> None:
        zero.model.zero_grad()  # of other weights
        own = state.parameter_names(zero.model, zero.units)
        names = {parameter: name for name, parameter in own.items() if name in held[0].shapes}
        for unit in zero.units:
            unit.release()
            shard = torch.zeros(unit.geometry.shard)
            for one in held_ranges(unit.geometry, wire.mesh.rank):
                numel = one.end - one.start
                shard[one.at : one.at + numel] = held[0].part(names[one.name], one.start, one.end)
            WholeValues(unit).load_shard(shard)
        for name, value in zero.model.state_dict(keep_vars=True).items():
            if name not in own:
                state.load_entry(zero.model, name, value, held[0].value(name))

    try:
        together(wire, find)
        together(wire, take)
    finally:
        for one in held:
            one.close()


class _Source:
    """A state dict, in memory or in a file."""

    def __init__(self, source: Path | str | Mapping[str, Any]) -> None:
        self._reader = None if isinstance(source, Mapping) else Reader(Path(source))
        self._values: dict[str, Any] = {}
        if self._reader is None:
            assert isinstance(source, Mapping)  # noqa: S101  # no file
            self._values = dict(source)
            self.shapes = {
                name: tuple(value.shape) if isinstance(value, Tensor) else None
                for name, value in self._values.items()
            }
        else:
            self._values = from_json(json.loads(self._reader.metadata.get(_EXTRA, "{}")))
            self.shapes = {name: entry.shape for name, entry in self._reader.entries.items()}
            self.shapes |= dict.fromkeys(self._values)

    def check(self, zero: Zero) -> None:
        """Refuse what does not fit the model."""
        own = state.parameter_names(zero.model, zero.units)
        given = {own[name] for name in self.shapes if name in own}
        held = dict(zero.model.state_dict(keep_vars=True))
        needed = {name: None for name in held if own.get(name) not in given or name in self.shapes}
        check_names(needed, self.shapes, "entries of the state dict")
        for name in needed:
            value = held[name]
            if (
                isinstance(value, Tensor)
                and not state.is_extra(name)
                and self.shapes[name] != tuple(value.shape)
            ):
                raise CheckpointError(
                    f"{name!r} is {self.shapes[name]} in it, {tuple(value.shape)} in the model"
                )

    def part(self, name: str, start: int, end: int) -> Tensor:
        """(end - start,) elements of a tensor."""
        if self._reader is None:
            return self._values[name].detach().reshape(-1)[start:end].cpu()  # type: ignore[no-any-return]
        return self._reader.read(name, start, end)

    def value(self, name: str) -> Any:
        """A whole entry."""
        if self._reader is None or name in self._values:
            return self._values[name]
        return self._reader.read(name).view(self._reader.entry(name).shape)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _opened(folder: Path | str) -> tuple[Path, Manifest]:
    """A checkpoint whose files are all as they were written."""
    path = resolve(Path(folder))
    manifest = read_manifest(path)
    verify(path, manifest.files)
    return path, manifest


def _parameter(manifest: Manifest, parts: Parts, name: str) -> Tensor:
    shape = manifest.parameters[name].shape
    whole = torch.empty(shape)
    flat = whole.view(-1)
    for offset, values in parts.read(WEIGHT, name, 0, flat.numel()):
        flat[offset : offset + len(values)] = values
    return whole


def _buffer(parts: Parts, name: str) -> Tensor:
    key = f"{BUFFER}/{name}"
    return parts.file(0).read(key).view(parts.file(0).entry(key).shape)
