"""Saves and loads checkpoints: any number of ranks, with any policy, can load what other ranks have saved.

Each rank writes one file, with the parts of parameters that are in its shards.  Rank 0 adds the manifest, which
describes the files.  Then one rename of the folder completes the checkpoint.  If a step of saving or loading fails on
one rank, all ranks raise the error (:func:`together`).  docs/guide/checkpoints.md states the guarantees.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impl import __version__
from impl.checkpoint import commit as disk
from impl.checkpoint.commit import CheckpointError, latest
from impl.checkpoint.json_values import from_json, to_json
from impl.checkpoint.manifest import Manifest, check_names, digest, file_name, read_manifest
from impl.checkpoint.optimizer_state import SavedMasters
from impl.checkpoint.resharding import Parts, ranges, write_tensors
from impl.comm.wire import Wire
from impl.engine import state_dict as state
from impl.engine.masters import LossScaler
from impl.errors import ZeroError, raised
from impl.policy.policy import Policy
from impl.policy.spans import in_words
from impl.unit.whole_values import WholeValues
from impl.zero import Zero

# Size in bytes of the message in which a rank tells the others the outcome of a step of saving or loading.  If the step
# succeeded, the message is its report in JSON.  If it failed, the message is "!" and the text of the error, cut to
# size.
MESSAGE_BYTES: Final = 1024
_T = TypeVar("_T")

__all__ = ["CheckpointError", "Loaded", "latest", "load", "save"]


class Loaded(NamedTuple):
    """The result of :func:`load`."""

    extra: Any  # the value that the caller passed to :func:`save`
    step: int  # number of optimizer steps before the checkpoint
    dropped: tuple[str, ...]  # a line for each part of the saved state that was not loaded, with the reason


def together(
    wire: Wire, attempt: Callable[[], tuple[_T, Any]], unlike: str | None = None
) -> tuple[_T, list[Any]]:
    """Run ``attempt`` on every rank, and raise on all ranks if it fails on any; all ranks must call this.

    If a rank raised its error alone, the other ranks would wait for this rank in the next exchange.

    Args:
        wire: the transport between the ranks.
        attempt: a function that returns a result of any type, and a short report in JSON's types.
        unlike: None if the reports of two ranks may differ.  Otherwise all reports must be equal, and ``unlike`` is the
            error's text: with ``"has another model"``, the error begins with ``rank 3 has another model`` if rank 3 is
            the first rank whose report differs.

    Returns:
        This rank's result, and the reports of all ranks in the order of ranks.

    Raises:
        CheckpointError: on all ranks, if ``attempt`` raises on any rank.  The message is that of the first rank that
            failed, after the words ``rank N:``.  These words are left out if all ranks failed with the same message.
            Also raised if ``unlike`` is given and the report of a rank differs from the report of rank 0.
    """
    failure, result = None, None
    try:
        result, report = attempt()
        outcome = json.dumps(report)
    except Exception as error:
        failure, outcome = error, "!" + _line(error)
    message = bytearray(outcome.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES))
    rows = wire.all_gather_small(torch.frombuffer(message, dtype=torch.uint8).to(wire.mesh.device))
    outcomes = [row.numpy().tobytes().decode(errors="ignore").rstrip() for row in rows.cpu()]
    for rank, text in enumerate(outcomes):
        if text.startswith("!"):
            prefix = "" if len(set(outcomes)) == 1 else f"rank {rank}: "
            raise CheckpointError(prefix + text[1:] + (wire.mesh.counting if prefix else "")) from failure
    others = [rank for rank, text in enumerate(outcomes) if text != outcomes[0]]
    if unlike and others:
        raise CheckpointError(f"rank {others[0]} {unlike}{wire.mesh.counting}")
    return result, [json.loads(text) for text in outcomes]  # type: ignore[return-value]  # no rank raised


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) if isinstance(error, CheckpointError | ZeroError) else raised(error)


def save(
    folder: Path | str,
    zero: Zero,
    optimizers: Sequence[Optimizer] = (),
    *,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Save the model, its optimizers and everything else that a resumed run needs.

    All ranks must call this between steps.

    Args:
        folder: the folder of checkpoints, on a disk that all ranks share.
        zero: the engine.
        optimizers: the optimizers to save.
        extra: any other values to save, the same on all ranks, such as the states of torch's schedulers.  They may be
            None, numbers, texts, and lists, tuples and dicts of these.
        keep: how many checkpoints to keep in ``folder``; older checkpoints are removed.  None keeps all.

    Returns:
        The folder of the new checkpoint, ``checkpoint-NNNNNN``.

    Raises:
        CheckpointError: on all ranks, if saving fails on any.
    """
    with zero.wire.calling("save()"):
        return _save(Path(folder), zero, optimizers, extra=extra, keep=keep)


def _save(folder: Path, zero: Zero, optimizers: Sequence[Optimizer], *, extra: Any, keep: int | None) -> Path:
    wire, rank = zero.wire, zero.wire.mesh.rank
    zero.buffers.make_equal()

    def describe() -> tuple[tuple[Manifest, SavedMasters], str]:
        zero.hooks.check_finished("save()")
        zero.hooks.check_parameters()
        if unused := zero.masters.unused_gradients:
            raise CheckpointError(
                f"save() was called, but no optimizer has used the gradients of {unused} of the masters (fp32 shards "
                "of weights): gradients are not saved; save after the step of every optimizer, or drop the gradients "
                "with model.zero_grad()"
            )
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep = {keep}: expected 1 or more, or None to keep all checkpoints")
        masters, setting = SavedMasters(zero.units, rank, optimizers, _group(zero)), zero.policy.loss_scale
        manifest = Manifest(
            writer=f"zeropp {__version__}, torch {torch.__version__}",
            step=zero.clock.step,
            micro_batch=zero.clock.micro_batch,
            topology=str(wire.mesh.topology),
            of=_identity(zero),
            state=to_json(_entries(zero), "state"),
            optimizers=masters.manifest_entries(),
            loss_scale=None if setting is None else {"setting": repr(setting), **zero.scaler.state_dict()},
            extra=to_json(extra, "extra"),
            files=[],
        )
        # Modules' extra states may differ between ranks; those of rank 0 are saved.
        return (manifest, masters), digest(asdict(replace(manifest, state={})))

    def begin() -> tuple[None, str]:
        if rank != 0:
            return None, ""
        if others := wire.mesh.claim(str(folder.resolve())):
            raise CheckpointError(
                f"{folder}: is already the folder of the checkpoints of {others} of this job: use another folder"
            )
        return None, disk.begin(folder).name

    def complete() -> tuple[None, str]:
        name = "" if rank else disk.commit(partial, replace(manifest, files=files).text()).name
        if keep is not None and rank == 0:
            disk.thin(folder, keep)
        return None, name

    unlike = "passes another value of extra=, or other optimizer options, than rank 0: make them equal on all ranks"
    (manifest, masters), _ = together(wire, describe, unlike)
    _, (begun, *_) = together(wire, begin)
    partial = folder / begun
    try:
        tensors, file = _tensors(zero, masters), partial / file_name(rank)
        _, files = together(wire, lambda: (None, write_tensors(file, tensors)))
        _, (name, *_) = together(wire, complete)
    except CheckpointError:
        if rank == 0 and partial.exists():
            disk.remove(partial)
        raise
    return folder / str(name)


def _identity(zero: Zero) -> dict[str, str]:
    """Returns the settings on which the communication state depends, as a dict from names to texts.

    The communication state is what messages depend on in addition to weights and gradients, such as the errors of error
    feedback.  If any of these settings differs between a run and a checkpoint, :func:`load` drops the checkpoint's
    communication state, except the numbers of the step and the micro-batch.
    """
    policy, topology = zero.policy, zero.wire.mesh.topology
    return {
        "topology": str(topology),
        "stage": str(policy.stage),
        "frozen": str(policy.frozen or "none"),
        "weights": str(policy.weights),
        "gradients": "/".join(map(str, policy.gradients)),
        "reduction": str(policy.reduce),
        "gather": str(policy.own_gather or "none"),
        "group": str(policy.group_ranks(topology)),
        "feedback": _of_phases(policy, lambda phase: str(phase.feedback or "none")),
        "differences": _of_phases(
            policy,
            lambda phase: f"{phase.differences} of {phase.copy_codec}" if phase.differences else "none",
        ),
        "schedule": in_words((span.text, span.end) for span in policy.schedule)
        if policy.schedule
        else "none",
        "budget": str(policy.budget or "none"),
        "local steps": _local_steps(policy),
        "seed": str(zero.clock.seed),
        "layout": hashlib.sha256(repr([unit.geometry for unit in zero.units]).encode()).hexdigest()[:16],
    }


def _local_steps(policy: Policy) -> str:
    """Returns the policy's settings of local steps (DiLoCo) in words; ``none`` if it has no local steps."""
    if policy.local_steps is None:
        return "none"
    outer = f"outer rate {policy.outer_rate:g}, outer momentum {policy.outer_momentum:g}"
    return f"{policy.local_steps} in {policy.local_fragments} fragments, {outer}"


def _group(zero: Zero) -> str | None:
    """Returns the prefix of the names under which this rank saves its values, or None in a run without local steps.

    In a run with local steps (DiLoCo), each state group (ranks that share one copy of all states) saves its own values,
    under names with the group's prefix.  The prefix is empty for the first group and ``group1:`` for the second.  A run
    with another topology or policy looks for names without a prefix, and so loads the first group's values.

    In a run without local steps, all ranks together save one copy, under names without a prefix.
    """
    if zero.policy.local_steps is None:
        return None
    mesh = zero.wire.mesh
    number = mesh.rank // zero.policy.group_ranks(mesh.topology)
    return f"group{number}:" if number else ""


def _of_phases(policy: Policy, text: Callable[[Policy], str]) -> str:
    """Returns all values that one setting of ``policy`` takes during a run, as text such as ``0.8 or none``.

    With a schedule, the policy changes during the run, and each policy in turn is a phase.  Without a schedule, the
    only phase is ``policy`` itself.  ``text`` is called with each phase and returns the setting's value in it.  Equal
    values are listed once, and ``none`` is last.
    """
    return " or ".join(sorted(dict.fromkeys(map(text, policy.phases)), key=lambda each: each == "none"))


def _entries(zero: Zero) -> dict[str, dict[str, Any]]:
    """Returns a dict that describes the model's state dict, as the manifest stores it: a description for each name.

    A parameter is described by its name and shape, and a buffer by its type and shape.  For a module's extra state, the
    description contains the state itself, not yet converted to JSON's types.
    """
    names = state.parameter_names(zero.model, zero.units)
    entries: dict[str, dict[str, Any]] = {}
    for name, value in zero.model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            entries[name] = {"extra": value}
        # A parameter without elements is in no unit, so ``names`` does not have it.
        elif name in names or (isinstance(value, nn.Parameter) and not value.numel()):
            entries[name] = {"parameter": names.get(name, name), "shape": list(value.shape)}
        else:
            entries[name] = {"buffer": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return entries


def _tensors(zero: Zero, masters: SavedMasters) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor that this rank writes to its file of the checkpoint."""
    mesh = zero.wire.mesh
    for unit in zero.units:
        master = unit.master_shard.master  # for weights that are kept as codes, a decoded copy
        group = _group(zero) if unit.geometry.trainable else None  # frozen weights are equal in all groups
        for part in ranges(unit.geometry, mesh.rank, saved=group is None):
            yield part.key(f"{group or ''}weight"), master[part.place]
        codes = unit.master_shard.codes
        if codes is not None and mesh.rank < unit.geometry.shards:  # other state groups hold copies
            yield f"codes/{unit.geometry.name}", codes
    yield from masters.tensors()
    values = zero.model.state_dict(keep_vars=True)
    for name, entry in _entries(zero).items() if mesh.rank == 0 else ():
        if "buffer" in entry:
            yield f"buffer/{name}", values[name]
    for name, value in zero.communication_state().items():
        yield f"codecs/{name}", value
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # NumPy's default generator
    text = json.dumps([random.getstate(), [name, np.asarray(keys).tolist(), *rest]])
    yield "random/torch", torch.get_rng_state()
    yield "random/python", torch.tensor(list(text.encode()), dtype=torch.uint8)
    if mesh.device.type != "cpu":
        yield "random/device", torch.cuda.get_rng_state(mesh.device)


def load(folder: Path | str, zero: Zero, optimizers: Sequence[Optimizer] = ()) -> Loaded:
    """Load a checkpoint, which any number of ranks may have saved with any policy.

    All ranks must call this.  If topology, policy and seed equal the saved run's, training continues bit for bit.
    Otherwise some state is dropped, and ``Loaded.dropped`` lists the dropped parts.  A dropped part of the engine's
    state, such as carried errors, then begins as in a new engine, even if the engine has trained before.

    Args:
        folder: a checkpoint, or a folder of checkpoints.  From a folder of checkpoints the newest is taken.
        zero: the engine.
        optimizers: optimizers of the same classes and parameters as those that were saved, in the same order.  Without
            optimizers, the saved optimizer states are dropped.

    Returns:
        The saved ``extra``, the number of optimizer steps before the checkpoint, and the dropped parts.

    Raises:
        CheckpointError: on all ranks, if any rank finds that the checkpoint is missing, incomplete or altered, or has
            another version, another model or other optimizers.  The model and the optimizers are then unchanged.  If
            instead the disk fails later, while values are read, a part of the values may have been loaded already.
    """
    with zero.wire.calling("load()"):
        return _load(Path(folder), zero, optimizers)


def _load(folder: Path, zero: Zero, optimizers: Sequence[Optimizer]) -> Loaded:
    wire, rank, world = zero.wire, zero.wire.mesh.rank, zero.wire.mesh.topology.world

    def find() -> tuple[tuple[Parts, SavedMasters], str]:
        zero.hooks.check_finished("load()")
        zero.hooks.check_parameters()
        zero.check_hidden("load()")
        path = disk.resolve(folder)
        manifest = read_manifest(path)
        manifest.verify(path, range(len(manifest.files))[rank::world])  # each rank verifies some of the files
        parts = Parts(path, manifest)
        masters = SavedMasters(zero.units, rank, optimizers, _group(zero))
        try:
            check_model(zero, manifest)
            if optimizers:
                masters.check(manifest.optimizers)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        return (parts, masters), digest(asdict(manifest))

    def take() -> tuple[list[str], None]:
        dropped = []
        group = "" if _unlike(zero, parts.manifest) else _group(zero) or ""
        _take_weights(zero, parts, group)
        if optimizers:
            masters.load(parts.manifest.optimizers, parts, group)
        elif parts.manifest.optimizers:
            saved = len(parts.manifest.optimizers)
            dropped = [f"states of optimizers (number saved: {saved}): load() was given no optimizers"]
        return [*dropped, *_take_run(zero, parts)], None

    (parts, masters), _ = together(
        wire,
        find,
        f"finds another checkpoint in {folder} than rank 0: name a folder on a disk that all ranks share",
    )
    dropped, _ = together(wire, take)
    return Loaded(from_json(parts.manifest.extra), parts.manifest.step, tuple(dropped))


def check_model(zero: Zero, manifest: Manifest) -> None:
    """Raise CheckpointError if the engine's model differs from the model that ``manifest`` describes.

    The state dicts of the two models must have the same names.  Parameters and buffers must have the same shapes, and
    buffers also the same types.  Extra states of modules may differ.
    """
    entries, saved = _entries(zero), manifest.state
    check_names(entries, saved, "entries of the state dict")
    for name, entry in entries.items():
        # Extra states may change their form in training, so they need not agree.
        if entry != saved[name] and not state.is_extra(name):
            raise CheckpointError(
                f"{name!r} is {saved[name]} in the checkpoint, but {entry} in the model: load the checkpoint into a "
                "model like the saved one"
            )


def _unlike(zero: Zero, manifest: Manifest) -> list[str]:
    """Returns a line for each setting of :func:`_identity` that differs between a checkpoint and this run."""
    return [
        f"saved with {name} {manifest.of.get(name)}, here {value}"
        for name, value in _identity(zero).items()
        if manifest.of.get(name, "none") != value  # older checkpoints do not have all names
    ]


def _take_weights(zero: Zero, parts: Parts, group: str) -> None:
    """Load this rank's weights, unit by unit, then buffers and modules' extra states.

    ``group`` is the prefix that the names of trained weights have in the files (:func:`_group`).
    """
    zero.model.zero_grad()  # gradients of the old weights are of no use
    for unit in zero.units:
        unit.reshard()
        wanted, shard = ranges(unit.geometry, zero.wire.mesh.rank), torch.zeros(unit.geometry.shard)
        kind = f"{group if unit.geometry.trainable else ''}weight"
        WholeValues(unit).load_shard(parts.fill(shard, kind, wanted))
    current, buffers = zero.model.state_dict(keep_vars=True), parts.tensors(0, "buffer")
    for name, entry in parts.manifest.state.items():
        if "parameter" not in entry:
            value = buffers[name] if "buffer" in entry else from_json(entry["extra"])
            state.load_entry(zero.model, name, current[name], value)


def _take_run(zero: Zero, parts: Parts) -> Iterator[str]:
    """Load everything except weights, buffers and optimizers; yield a line for each part that is dropped, and why.

    The parts are the loss scale, the numbers of the step and the micro-batch, the communication state (such as the
    errors of error feedback), the frozen weights in encoded form, and the states of the random number generators.
    """
    mesh, manifest, scaler = zero.wire.mesh, parts.manifest, zero.scaler
    scaler.load_state_dict(LossScaler(zero.policy.loss_scale).state_dict())  # not that of earlier training
    if manifest.loss_scale is not None:
        scale, current = dict(manifest.loss_scale), repr(zero.policy.loss_scale)
        setting = scale.pop("setting")
        if setting == current:
            scaler.load_state_dict(scale)
        else:
            yield f"loss scale: saved with {setting}, here {current}"
    holding_codes = [unit for unit in zero.units if unit.master_shard.codes is not None]
    if differ := _unlike(zero, manifest):
        zero.reset_communication_state(step=manifest.step, micro_batch=manifest.micro_batch)
        for feature in ("feedback", "differences", "budget"):
            if manifest.of.get(feature, "none") != "none":
                yield f"state of {feature}: {differ[0]}"
        if manifest.of.get("local steps", "none") != "none":
            yield f"state of local steps, so weights and optimizer states are those of group 0: {differ[0]}"
        for name in ("reduction", "gather"):
            if ":" in (method := manifest.of.get(name, "")):
                yield f"state of {method}: {differ[0]}"
        if holding_codes:
            yield f"codes of frozen weights, which are encoded again: {differ[0]}"
    else:
        zero.load_communication_state(parts.tensors(mesh.rank, "codecs"))
        for unit in holding_codes:
            codes = parts.tensors(mesh.rank % unit.geometry.shards, "codes")
            WholeValues(unit).load_codes(codes[unit.geometry.name])
    if len(manifest.files) != mesh.topology.world:
        yield f"random states: the number of ranks was {len(manifest.files)}, and is {mesh.topology.world} here"
        return
    states = parts.tensors(mesh.rank, "random")
    torch.set_rng_state(states["torch"])
    (version, keys, last), (name, numbers, *rest) = json.loads(states["python"].numpy().tobytes())
    random.setstate((version, tuple(keys), last))
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), *rest))  # noqa: NPY002
    if mesh.device.type != "cpu" and "device" in states:
        torch.cuda.set_rng_state(states["device"], mesh.device)
