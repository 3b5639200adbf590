"""Checkpoints: saved by all ranks, loaded by any number of them under any policy.

Each rank writes the ranges of parameters that it alone holds into one safetensors file; rank 0 adds the
manifest, and one rename completes the checkpoint (:mod:`impl.checkpoint.commit`).  Another layout reads what
it holds out of those ranges (:mod:`impl.checkpoint.resharding`).  Whatever a rank cannot do, none does
(:mod:`impl.checkpoint.all_ranks`).  docs/guide/checkpoints.md says what is promised.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impl import __version__
from impl.checkpoint import manifest as files
from impl.checkpoint import safetensors_file
from impl.checkpoint.all_ranks import together
from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.commit import (
    Begun,
    begin,
    commit,
    complete_name,
    give_up,
    latest,
    resolve,
    thin,
    verify,
)
from impl.checkpoint.json_values import from_json, to_json
from impl.checkpoint.manifest import Manifest, SavedFile, SavedParameter, SavedScale, SavedValue
from impl.checkpoint.optimizer_state import SavedMasters
from impl.checkpoint.resharding import Parts, Range, held_ranges, saved_parameters, saved_ranges
from impl.checkpoint.rng_state import load_random_states, random_states
from impl.checkpoint.safetensors_file import Entry, Reader, Written
from impl.checkpoint.tensor_bytes import content, entry_of
from impl.comm.wire import Wire
from impl.engine import state_dict as state
from impl.plan.policy import DYNAMIC, LossScale
from impl.unit.unit import Unit
from impl.unit.whole_values import WholeValues
from impl.zero import Zero

__all__ = ["CheckpointError", "Loaded", "Saving", "latest", "load", "save"]

_log = logging.getLogger(__name__)

_saving: weakref.WeakKeyDictionary[Zero, Saving] = weakref.WeakKeyDictionary()  # in the background


@atexit.register
def _say_what_is_lost() -> None:
    for saving in list(_saving.values()):
        _log.warning("%s: not complete, and lost: nobody called wait() of its save", saving.path)


class Loaded(NamedTuple):
    """What a load brought.

    Attributes:
        extra: what the caller gave to :func:`save`.
        step: optimizer steps before the checkpoint.
        dropped: what the checkpoint holds and this run could not, or was not asked to, take over: a line
            each.
    """

    extra: Any
    step: int
    dropped: tuple[str, ...]


@dataclass(eq=False, repr=False)
class Saving:
    """A checkpoint on its way to ``path``."""

    path: Path
    _wire: Wire  # not the engine, which may go before
    _begun: Begun
    _manifest: Manifest
    _keep: int | None
    _write: Callable[[], Written]  # or waits until this rank's file is written
    _failed: CheckpointError | None = None
    _complete: bool = False

    def wait(self) -> Path:
        """Complete the checkpoint: until this returns there is none; all ranks call it.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: on all ranks if any could not write; then there is no such checkpoint.
        """
        if self._failed is not None:
            raise self._failed
        if not self._complete:
            for zero in [zero for zero, saving in _saving.items() if saving is self]:
                del _saving[zero]
            wire = self._wire
            try:
                written = together(wire, lambda: asdict(self._write()))
                together(wire, lambda: self._commit(written) if wire.mesh.rank == 0 else None)
            except CheckpointError as error:
                self._failed = error
                if wire.mesh.rank == 0:
                    give_up(self._begun.partial)
                raise
            finally:
                self._begun.release()
            self._complete = True
        return self.path

    def _commit(self, written: Sequence[dict[str, Any]]) -> None:
        written_files = [SavedFile(name=files.file_name(rank), **one) for rank, one in enumerate(written)]
        commit(self._begun.partial, self._manifest.model_copy(update={"files": written_files}))
        if self._keep is not None:
            thin(self.path.parent, self._keep)


class _Item(NamedTuple):
    """A tensor to be saved: its value is asked for once."""

    key: str
    entry: Entry
    value: Callable[[], Tensor]


def save(
    folder: Path | str,
    zero: Zero,
    optimizers: Sequence[Optimizer] = (),
    *,
    extra: Any = None,
    asynchronous: bool = False,
    keep: int | None = None,
) -> Saving:
    """Save the model, its optimizers and all that a resumed run needs; all ranks call it, between steps.

    Args:
        folder: of the run's checkpoints, on a disk that all ranks share; this one becomes
            ``checkpoint-NNNNNN`` in it, one further than the newest.
        zero: the engine.
        optimizers: over its masters.
        extra: the caller's, the same on all ranks: None, numbers, texts, lists, tuples and dicts of them.
        asynchronous: copy all values to host memory, write them in the background, and return; the
            checkpoint is completed by :meth:`Saving.wait`, or by the next save or load.
        keep: checkpoints to keep, the newest ones; None for all.

    Raises:
        CheckpointError: on all ranks, if this, or an asynchronous save before it, fails on any; what was
            complete before stays.
    """
    if zero in _saving:
        _saving[zero].wait()
    folder, wire = Path(folder), zero.wire
    rank = wire.mesh.rank
    zero.buffers.make_equal()
    manifest: Manifest
    items: list[_Item]
    begun: Begun | None = None

    def describe() -> str:
        nonlocal manifest, items
        _check_between_steps(zero)
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep = {keep}: expected 1 or more")
        masters = SavedMasters(zero.units, rank, optimizers)
        manifest = _manifest(zero, masters, extra)
        items = list(_items(zero, masters, manifest.state))
        # Extra states of modules are rank 0's, as buffers that are no numbers are.
        return manifest.model_copy(update={"state": []}).digest()

    def prepare() -> str:
        nonlocal begun, items
        if asynchronous:
            items = _copied(items, wire.mesh.device)
        if rank == 0:
            begun = begin(folder)
        return begun.partial.name if begun else ""

    digests = together(wire, describe)
    if odd := [other for other, digest in enumerate(digests) if digest != digests[0]]:
        raise CheckpointError(
            f"rank {odd[0]} would save another extra, or options of optimizers, than rank 0: make them equal"
        )
    try:
        partial = folder / together(wire, prepare)[0]
    except CheckpointError:
        if begun is not None:
            give_up(begun.partial)
            begun.release()
        raise
    write: Callable[[], Written] = functools.partial(_write, partial, rank, items)
    if asynchronous:
        pool = ThreadPoolExecutor(1)
        write = pool.submit(write).result
        pool.shutdown(wait=False)
    begun = begun or Begun(partial, None)
    saving = Saving(complete_name(partial), wire, begun, manifest, keep, write)
    if asynchronous:
        _saving[zero] = saving
    else:
        saving.wait()
    return saving


def _check_between_steps(zero: Zero) -> None:
    """Refuse a moment at which gradients wait to be used: they are not saved."""
    zero.hooks.backward.check_finished("save()")
    if unused := zero.masters.unused_gradients:
        raise CheckpointError(
            f"save() with gradients that no optimizer has used, of {unused} masters: they are "
            "not saved; save after the step of every optimizer, or drop them with model.zero_grad()"
        )


def _identity(zero: Zero) -> dict[str, str]:
    """What must be equal for a run to take over the state of codecs."""
    return {
        "topology": str(zero.wire.mesh.topology),
        "stage": str(zero.policy.stage),
        "frozen": str(zero.policy.frozen or "none"),
        **state.run_identity(zero.clock, zero.wire, zero.policy),
        "layout": hashlib.sha256(repr([unit.geometry for unit in zero.units]).encode()).hexdigest()[:16],
    }


def _manifest(zero: Zero, masters: SavedMasters, extra: Any) -> Manifest:
    parameters, entries = _described(zero, values=True)
    setting = zero.policy.loss_scale
    scale = None if setting is None else SavedScale(setting=_words(setting), **zero.scaler.state_dict())
    return Manifest(
        format=files.FORMAT,
        version=files.VERSION,
        writer=f"zeropp {__version__}, torch {torch.__version__}",
        step=zero.clock.step,
        micro_batch=zero.clock.micro_batch,
        topology=str(zero.wire.mesh.topology),
        of=_identity(zero),
        parameters=parameters,
        state=entries,
        optimizers=masters.described(),
        loss_scale=scale,
        extra=to_json(extra, "extra"),
        files=[],
    )


def _described(zero: Zero, *, values: bool) -> tuple[dict[str, SavedParameter], list[SavedValue]]:
    """Its parameters, and the entries of its state dict, in order.

    Args:
        zero: the engine.
        values: whether with those of modules' extra states, which must then have a form that can be saved.
    """
    parameters = saved_parameters([unit.geometry for unit in zero.units], zero.wire.mesh.topology.world)
    own = state.parameter_names(zero.model, zero.units)
    empty: dict[int, str] = {}  # parameters without elements that no unit holds, as another layout's may
    entries = []
    for name, value in zero.model.state_dict(keep_vars=True).items():
        if name not in own and isinstance(value, nn.Parameter) and not value.numel():
            own[name] = empty.setdefault(id(value), name)
            parameters[own[name]] = SavedParameter(
                shape=list(value.shape), trainable=value.requires_grad, ranges=[]
            )
        if name in own:
            entries.append(SavedValue(name=name, kind="parameter", of=own[name]))
        elif not values and (state.is_extra(name) or not isinstance(value, Tensor)):
            entries.append(SavedValue(name=name, kind="extra"))
        elif isinstance(value, Tensor):
            entry = entry_of(value, name)
            entries.append(SavedValue(name=name, kind="buffer", tensor=(entry.dtype, list(entry.shape))))
        else:
            entries.append(SavedValue(name=name, kind="extra", value=to_json(value, name)))
    return parameters, entries


def _words(setting: LossScale | None) -> str:
    """All that makes the loss scale move."""
    if setting is None:
        return "none"
    return str(setting) if setting.least == DYNAMIC.least else f"{setting}:least{setting.least:g}"


def _items(zero: Zero, masters: SavedMasters, entries: Sequence[SavedValue]) -> Iterator[_Item]:
    """What this rank saves, in the order of its file: 4-byte values first, bytes last."""
    mesh = zero.wire.mesh

    @functools.lru_cache(maxsize=1)  # of weights that are held as codes, decoding makes a copy
    def whole(unit: Unit) -> Tensor:
        return unit.master_shard.master

    def part(unit: Unit, first: int, numel: int) -> Tensor:
        return whole(unit)[first : first + numel]

    for unit in zero.units:
        for one in saved_ranges(unit.geometry, mesh.rank):
            numel = one.end - one.start
            get = functools.partial(part, unit, one.at, numel)
            yield _Item(files.key_of(files.WEIGHT, one.name, one.start), Entry("F32", (numel,)), get)
    for kind, one, values in masters.elements():
        yield _held(files.key_of(kind, one.name, one.start), values)
    if mesh.rank == 0:
        held = zero.model.state_dict(keep_vars=True)
        for entry in entries:
            if entry.kind == "buffer":
                yield _held(f"{files.BUFFER}/{entry.name}", held[entry.name])
    for name, value in zero.communication_state().items():
        yield _held(f"{files.CODECS}/{name}", value)
    for unit in zero.units:
        codes = unit.master_shard.codes
        if codes is not None and mesh.rank < unit.geometry.shards:  # other groups hold copies
            yield _held(f"{files.CODES}/{unit.geometry.name}", codes)
    for name, value in random_states(mesh.device).items():
        yield _held(f"{files.RANDOM}/{name}", value)


def _held(key: str, value: Tensor) -> _Item:
    return _Item(key, entry_of(value, key), lambda: value)


def _copied(items: Sequence[_Item], device: torch.device) -> list[_Item]:
    """The same values in host memory of their own."""
    pinned = device.type == "cuda"
    copies = []
    for item in items:
        value = item.value().detach()
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        copies.append(_held(item.key, copy.copy_(value, non_blocking=pinned)))
    if pinned:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _write(partial: Path, rank: int, items: Sequence[_Item]) -> Written:
    """This rank's file."""
    entries = {item.key: item.entry for item in items}
    contents = (content(item.value()) for item in items)
    return safetensors_file.write(partial / files.file_name(rank), entries, contents)


# Loading


def load(folder: Path | str, zero: Zero, optimizers: Sequence[Optimizer] = ()) -> Loaded:
    """Take over a checkpoint, written by any number of ranks under any policy; all ranks call it.

    On the same topology and policy the run goes on bit for bit; otherwise weights, buffers and the state
    of optimizers are equal by name, and the result says what could not be taken over.

    Args:
        folder: a checkpoint, or a folder of them, of which the newest is taken.
        zero: the engine, of the same model.
        optimizers: as they were saved; without any, the checkpoint's are left.

    Raises:
        CheckpointError: on all ranks, if any finds it missing, foreign, newer, cut short, altered or of
            another model; nothing is changed then, unless the disk fails while values are read.
    """
    if zero in _saving:
        _saving[zero].wait()
    wire = zero.wire
    rank, world = wire.mesh.rank, wire.mesh.topology.world
    path: Path
    manifest: Manifest
    masters: SavedMasters
    dropped: list[str] = []

    def find() -> str:
        nonlocal path, manifest, masters
        zero.hooks.backward.check_finished("load()")
        zero.check_hidden("load()")
        path = resolve(Path(folder))
        manifest = files.read_manifest(path)
        masters = SavedMasters(zero.units, rank, optimizers)
        try:
            _check_model(zero, manifest)
            if optimizers:
                masters.check(manifest.optimizers)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        return manifest.digest()

    digests = together(wire, find)
    if odd := [other for other, digest in enumerate(digests) if digest != digests[0]]:
        raise CheckpointError(f"{folder}: rank {odd[0]} sees another checkpoint than rank 0")
    together(wire, lambda: verify(path, manifest.files[rank::world]))

    def take() -> None:
        parts = Parts(path, manifest)
        take_weights(zero, lambda one: parts.read(files.WEIGHT, one.name, one.start, one.end))
        if optimizers:
            masters.load(manifest.optimizers, parts)
        elif manifest.optimizers:
            dropped.append(f"state of {len(manifest.optimizers)} optimizers: not asked for")
        _take_entries(zero, parts)
        dropped.extend(_take_run(zero, parts))

    together(wire, take)
    return Loaded(from_json(manifest.extra), manifest.step, tuple(dropped))


def _check_model(zero: Zero, manifest: Manifest) -> None:
    """Refuse a checkpoint of another model."""
    parameters, entries = _described(zero, values=False)  # an extra state of its own may be none to be saved
    files.check_names(parameters, manifest.parameters, "parameters")
    for name, one in parameters.items():
        inside, here = tuple(manifest.parameters[name].shape), tuple(one.shape)
        if inside != here:
            raise CheckpointError(f"parameter {name!r} is {inside} in it, {here} in the model")
    held = {one.name: one for one in manifest.state}
    files.check_names([one.name for one in entries], held, "entries of the state dict")
    for own in entries:
        saved = held[own.name]
        if state.is_extra(own.name):
            continue
        if saved.kind != own.kind:
            raise CheckpointError(f"{own.name!r} is {saved.kind} in it, {own.kind} in the model")
        if saved.entry != own.entry:
            raise CheckpointError(f"buffer {own.name!r} is {saved.entry} in it, {own.entry} in the model")


def take_weights(zero: Zero, read: Callable[[Range], Iterable[tuple[int, Tensor]]]) -> None:
    """Overwrite the weights that this rank holds, unit by unit.

    Args:
        zero: the engine.
        read: of a range, (offset in it, (n,) values) of all its parts.
    """
    zero.model.zero_grad()  # of other weights
    for unit in zero.units:
        unit.release()
        shard = torch.zeros(unit.geometry.shard)
        for one in held_ranges(unit.geometry, zero.wire.mesh.rank):
            for offset, values in read(one):
                shard[one.at + offset : one.at + offset + len(values)] = values
        WholeValues(unit).load_shard(shard)


def _take_entries(zero: Zero, parts: Parts) -> None:
    """Buffers and modules' extra states."""
    own = zero.model.state_dict(keep_vars=True)
    for one in parts.manifest.state:
        if one.kind != "parameter":
            value = parts.buffer(one.name) if one.kind == "buffer" else from_json(one.value)
            state.load_entry(zero.model, one.name, own[one.name], value)


def _take_run(zero: Zero, parts: Parts) -> Iterator[str]:
    """Loss scale, clock, state of codecs and random states; yields what is left."""
    mesh, manifest = zero.wire.mesh, parts.manifest
    if (saved := manifest.loss_scale) is not None:
        if saved.setting == (here := _words(zero.policy.loss_scale)):
            zero.scaler.load_state_dict(saved.model_dump())
        else:
            yield f"loss scale of {saved.setting}: here {here}"
    zero.clock.step, zero.clock.micro_batch = manifest.step, manifest.micro_batch
    holding_codes = [unit for unit in zero.units if unit.master_shard.codes is not None]
    identity = _identity(zero)
    differ = [name for name, value in identity.items() if manifest.of.get(name) != value]
    if not differ:
        zero.load_communication_state(_tensors(parts.file(mesh.rank), files.CODECS))
        for unit in holding_codes:
            held = _tensors(parts.file(mesh.rank % unit.geometry.shards), files.CODES)
            WholeValues(unit).load_codes(held[unit.geometry.name])
    else:
        name = differ[0]
        why = f"it was saved with {name} {manifest.of.get(name)}, here {identity[name]}"
        if manifest.of.get("feedback", "none") != "none":
            yield f"errors that gradient codecs carried: {why}"
        if holding_codes:
            yield f"codes of frozen weights, which were encoded again: {why}"
    if len(manifest.files) == mesh.topology.world:
        load_random_states(_tensors(parts.file(mesh.rank), files.RANDOM), mesh.device)
    else:
        yield f"random states of {len(manifest.files)} ranks: here {mesh.topology.world}"


def _tensors(reader: Reader, kind: str) -> dict[str, Tensor]:
    """All of one kind in a rank's file."""
    return {
        key.removeprefix(f"{kind}/"): reader.tensor(key)
        for key in reader.entries
        if key.startswith(f"{kind}/")
    }
