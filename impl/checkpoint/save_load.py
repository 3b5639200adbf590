"""Checkpoints: saved by all ranks, loaded by any number of them under any policy.

Each rank writes the ranges of parameters that it alone holds into one safetensors file; rank 0 adds the
manifest, and one rename completes the checkpoint (:mod:`impl.checkpoint.manifest`).  Whatever a rank cannot
do, none does (:mod:`impl.checkpoint.all_ranks`).  docs/guide/checkpoints.md says what is promised.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impl import __version__
from impl.checkpoint import safetensors_file
from impl.checkpoint.all_ranks import together
from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.json_values import from_json, to_json
from impl.checkpoint.manifest import (
    BUFFER,
    CODECS,
    CODES,
    FORMAT,
    RANDOM,
    VERSION,
    WEIGHT,
    Begun,
    Manifest,
    Parts,
    SavedFile,
    SavedParameter,
    SavedScale,
    SavedValue,
    begin,
    check_names,
    commit,
    complete_name,
    file_name,
    give_up,
    key_of,
    latest,
    layout_digest,
    read_manifest,
    resolve,
    saved_parameters,
    thin,
    verify,
)
from impl.checkpoint.optimizer_state import Masters
from impl.checkpoint.ranges import held_ranges, saved_ranges
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


class Saving:
    """A checkpoint on its way.

    Attributes:
        path: where it will be.
    """

    def __init__(
        self,
        wire: Wire,
        begun: Begun,
        keep: int | None,
        manifest: Manifest,
        write: Callable[[], Written],
    ) -> None:
        self.path = complete_name(begun.partial)
        self._wire, self._begun = wire, begun  # not the engine, which may go before
        self._keep, self._manifest = keep, manifest
        self._write = write
        self._outcome: Written | Exception | None = None  # of this rank's file
        self._thread: threading.Thread | None = None
        self._failed: CheckpointError | None = None
        self._complete = False

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
            try:
                self._finish()
            except CheckpointError as error:
                self._failed = error
                if self._wire.mesh.rank == 0:
                    give_up(self._begun.partial)
                raise
            finally:
                self._begun.release()
            self._complete = True
        return self.path

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        else:
            self._run()
        wire = self._wire
        told = together(wire, self._told)
        together(wire, lambda: self._commit(told) if wire.mesh.rank == 0 else None)

    def start(self) -> None:
        """Write in the background."""
        self._thread = threading.Thread(target=self._run, name=f"save {self.path.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._write()
        except Exception as error:  # told to all ranks in wait()
            self._outcome = error

    def _told(self) -> dict[str, Any]:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None  # noqa: S101  # it has run
        return {"nbytes": self._outcome.nbytes, "sha256": self._outcome.sha256}

    def _commit(self, told: Sequence[dict[str, Any]]) -> None:
        files = [SavedFile(name=file_name(rank), **one) for rank, one in enumerate(told)]
        commit(self._begun.partial, self._manifest.model_copy(update={"files": files}))
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
    _finish_saving(zero)
    folder, wire = Path(folder), zero.wire
    rank = wire.mesh.rank
    zero.buffers.make_equal()
    manifests: list[Manifest] = []
    items: list[_Item] = []

    def describe() -> str:
        _check_between_steps(zero)
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep = {keep}: expected 1 or more")
        masters = Masters(zero.units, rank, optimizers)
        manifests.append(_manifest(zero, masters, extra))
        items.extend(_items(zero, masters))
        # Extra states of modules are rank 0's, as buffers that are no numbers are.
        return hashlib.sha256(manifests[0].model_copy(update={"state": []}).text().encode()).hexdigest()

    begun: list[Begun] = []

    def prepare() -> str:
        if asynchronous:
            items[:] = _copied(items, wire.mesh.device)
        if rank == 0:
            begun.append(begin(folder))
        return begun[0].partial.name if begun else ""

    digests = together(wire, describe)
    if odd := [other for other, digest in enumerate(digests) if digest != digests[0]]:
        raise CheckpointError(
            f"rank {odd[0]} would save another extra, or options of optimizers, than rank 0: make them equal"
        )
    try:
        partial = folder / together(wire, prepare)[0]
    except CheckpointError:
        for one in begun:
            give_up(one.partial)
            one.release()
        raise
    here = begun[0] if begun else Begun(partial, None)
    saving = Saving(wire, here, keep, manifests[0], lambda: _write(partial, rank, items))
    if asynchronous:
        _saving[zero] = saving
        saving.start()
    else:
        saving.wait()
    return saving


def _finish_saving(zero: Zero) -> None:
    if zero in _saving:
        _saving[zero].wait()


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
        "layout": layout_digest([unit.geometry for unit in zero.units]),
    }


def _manifest(zero: Zero, masters: Masters, extra: Any) -> Manifest:
    topology = zero.wire.mesh.topology
    empty = _empty_parameters(zero)
    own = state.parameter_names(zero.model, zero.units) | {name: of for name, (of, _) in empty.items()}
    entries = []
    for name, value in zero.model.state_dict(keep_vars=True).items():
        if name in own:
            entries.append(SavedValue(name=name, kind="parameter", of=own[name]))
        elif isinstance(value, Tensor):
            entry = entry_of(value, name)
            entries.append(SavedValue(name=name, kind="buffer", tensor=(entry.dtype, list(entry.shape))))
        else:
            entries.append(SavedValue(name=name, kind="extra", value=to_json(value, name)))
    setting = zero.policy.loss_scale
    return Manifest(
        format=FORMAT,
        version=VERSION,
        writer=f"zeropp {__version__}, torch {torch.__version__}",
        step=zero.clock.step,
        micro_batch=zero.clock.micro_batch,
        topology=str(topology),
        of=_identity(zero),
        parameters=saved_parameters([unit.geometry for unit in zero.units], topology.world)
        | dict(empty.values()),
        state=entries,
        optimizers=masters.described(),
        loss_scale=None if setting is None else _scale(setting, zero.scaler.state_dict()),
        extra=to_json(extra, "extra"),
        files=[],
    )


def _words(setting: LossScale | None) -> str:
    """All that makes the loss scale move."""
    if setting is None:
        return "none"
    return str(setting) if setting.least == DYNAMIC.least else f"{setting}:least{setting.least:g}"


def _scale(setting: LossScale, state: dict[str, Any]) -> SavedScale:
    return SavedScale(setting=_words(setting), **state)


def _empty_parameters(zero: Zero) -> dict[str, tuple[str, SavedParameter]]:
    """Parameters without elements that no unit holds, as another layout's may: own name and description."""
    own = state.parameter_names(zero.model, zero.units)
    first: dict[int, str] = {}
    return {
        name: (
            first.setdefault(id(value), name),
            SavedParameter(shape=list(value.shape), trainable=value.requires_grad, ranges=[]),
        )
        for name, value in zero.model.state_dict(keep_vars=True).items()
        if name not in own and isinstance(value, nn.Parameter) and not value.numel()
    }


def _items(zero: Zero, masters: Masters) -> Iterator[_Item]:
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
            yield _Item(key_of(WEIGHT, one.name, one.start), Entry("F32", (numel,)), get)
    for kind, one, values in masters.elements():
        yield _held(key_of(kind, one.name, one.start), values)
    if mesh.rank == 0:
        own, empty = state.parameter_names(zero.model, zero.units), _empty_parameters(zero)
        for name, value in zero.model.state_dict(keep_vars=True).items():
            if name not in own and name not in empty and isinstance(value, Tensor):
                yield _held(f"{BUFFER}/{name}", value)
    for name, value in zero.communication_state().items():
        yield _held(f"{CODECS}/{name}", value)
    for unit in zero.units:
        if (
            unit.master_shard.codes is not None and mesh.rank < unit.geometry.shards
        ):  # other groups hold copies
            yield _held(f"{CODES}/{unit.geometry.name}", unit.master_shard.codes)
    for name, value in random_states(mesh.device).items():
        yield _held(f"{RANDOM}/{name}", value)


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
    return safetensors_file.write(partial / file_name(rank), entries, contents)


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
    _finish_saving(zero)
    wire = zero.wire
    rank, world = wire.mesh.rank, wire.mesh.topology.world
    found: list[tuple[Path, Manifest, Masters, Any]] = []

    def find() -> str:
        zero.hooks.backward.check_finished("load()")
        zero.check_hidden("load()")
        path = resolve(Path(folder))
        manifest = read_manifest(path)
        masters = Masters(zero.units, rank, optimizers)
        try:
            _check_model(zero, manifest)
            if optimizers:
                masters.check(manifest.optimizers)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        found.append((path, manifest, masters, from_json(manifest.extra)))
        return hashlib.sha256(manifest.text().encode()).hexdigest()

    digests = together(wire, find)
    if odd := [other for other, digest in enumerate(digests) if digest != digests[0]]:
        raise CheckpointError(f"{folder}: rank {odd[0]} sees another checkpoint than rank 0")
    path, manifest, masters, extra = found[0]
    together(wire, lambda: verify(path, manifest.files[rank::world]))
    dropped: list[str] = []

    def take() -> None:
        with Parts(path, manifest) as parts:
            _take_weights(zero, parts)
            if optimizers:
                masters.load(manifest.optimizers, parts)
            elif manifest.optimizers:
                dropped.append(f"state of {len(manifest.optimizers)} optimizers: not asked for")
            _take_entries(zero, manifest, parts)
            dropped.extend(_take_run(zero, manifest, parts))

    together(wire, take)
    return Loaded(extra, manifest.step, tuple(dropped))


def _check_model(zero: Zero, manifest: Manifest) -> None:
    """Refuse a checkpoint of another model."""
    own = {slot.spec.name: slot.spec.shape for unit in zero.units for slot in unit.geometry.slots}
    empty = _empty_parameters(zero)
    own |= {name: tuple(one.shape) for name, one in empty.values()}
    held = {name: tuple(one.shape) for name, one in manifest.parameters.items()}
    check_names(own, held, "parameters")
    for name, shape in own.items():
        if held[name] != shape:
            raise CheckpointError(f"parameter {name!r} is {held[name]} in it, {shape} in the model")
    entries = zero.model.state_dict(keep_vars=True)
    check_names(entries, {one.name: None for one in manifest.state}, "entries of the state dict")
    sharded = {*state.parameter_names(zero.model, zero.units), *empty}
    for one in manifest.state:
        value = entries[one.name]
        tensor = "buffer" if isinstance(value, Tensor) else "extra"
        kind = "parameter" if one.name in sharded else tensor
        if kind != one.kind and not state.is_extra(one.name):
            raise CheckpointError(f"{one.name!r} is {one.kind} in it, {kind} in the model")
        if one.tensor is not None and not state.is_extra(one.name):
            inside, here = Entry(one.tensor[0], tuple(one.tensor[1])), entry_of(value, one.name)
            if inside != here:
                raise CheckpointError(
                    f"buffer {one.name!r} is {inside.dtype} {inside.shape} in it, "
                    f"{here.dtype} {here.shape} in the model"
                )


def _take_weights(zero: Zero, parts: Parts) -> None:
    zero.model.zero_grad()  # of other weights
    for unit in zero.units:
        unit.release()
        shard = torch.zeros(unit.geometry.shard)
        for one in held_ranges(unit.geometry, zero.wire.mesh.rank):
            for offset, values in parts.read(WEIGHT, one.name, one.start, one.end):
                shard[one.at + offset : one.at + offset + len(values)] = values
        WholeValues(unit).load_shard(shard)


def _take_entries(zero: Zero, manifest: Manifest, parts: Parts) -> None:
    """Buffers and modules' extra states."""
    own = zero.model.state_dict(keep_vars=True)
    for one in manifest.state:
        if one.kind == "buffer":
            key = f"{BUFFER}/{one.name}"
            entry = parts.file(0).entry(key)
            value = parts.file(0).read(key).view(entry.shape)
            state.load_entry(zero.model, one.name, own[one.name], value)
        elif one.kind == "extra":
            state.load_entry(zero.model, one.name, own[one.name], from_json(one.value))


def _take_run(zero: Zero, manifest: Manifest, parts: Parts) -> Iterator[str]:
    """Loss scale, clock, state of codecs and random states; yields what is left."""
    mesh = zero.wire.mesh
    setting = zero.policy.loss_scale
    if manifest.loss_scale is not None:
        saved = manifest.loss_scale
        if saved.setting == _words(setting):
            zero.scaler.load_state_dict(saved.model_dump())
        else:
            yield f"loss scale of {saved.setting}: here {_words(setting)}"
    identity = _identity(zero)
    differ = [name for name, value in identity.items() if manifest.of.get(name) != value]
    zero.clock.step, zero.clock.micro_batch = manifest.step, manifest.micro_batch
    if not differ:
        zero.load_communication_state(_tensors(parts.file(mesh.rank), CODECS))
        for unit in zero.units:
            if unit.master_shard.codes is not None:
                held = _tensors(parts.file(mesh.rank % unit.geometry.shards), CODES)
                WholeValues(unit).load_codes(held[unit.geometry.name])
    else:
        name = differ[0]
        why = f"it was saved with {name} {manifest.of.get(name)}, here {identity[name]}"
        if manifest.of.get("feedback", "none") != "none":
            yield f"errors that gradient codecs carried: {why}"
        if any(unit.master_shard.codes is not None for unit in zero.units):
            yield f"codes of frozen weights, which were encoded again: {why}"
    if len(manifest.files) == mesh.topology.world:
        load_random_states(_tensors(parts.file(mesh.rank), RANDOM), mesh.device)
    else:
        yield f"random states of {len(manifest.files)} ranks: here {mesh.topology.world}"


def _tensors(reader: Reader, kind: str) -> dict[str, Tensor]:
    """All of one kind in a rank's file."""
    return {
        key.removeprefix(f"{kind}/"): reader.read(key).view(entry.shape)
        for key, entry in reader.entries.items()
        if key.startswith(f"{kind}/")
    }
