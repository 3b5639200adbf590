"""Predicts the memory that a rank needs at each stage of ZeRO, as a table, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from torch import nn

from harness.records.memory_parts import HOST, on_device, on_host
from harness.runs.feasibility import PROCESS_BYTES, Host
from harness.runs.predict import per_node_bytes, rank_memory
from harness.suites.model_sizes import GPTShape
from harness.suites.trial import Trial
from harness.workloads.preset_parameters import shape_of
from impl.codecs.codec import ITEM_BYTES
from impl.engine.unit_planning import plan_units
from impl.policy.policy import MemoryLimits, Policy, Stage
from impl.policy.topology import Topology

GB: Final = 1e9  # bytes; DeepSpeed's tutorials use the same unit
MB: Final = 1e6
# Bytes of activations in 16 bits that a block keeps for backward, for each token and channel: arXiv 2205.05198,
# equation 1, without attention scores.
_BLOCK_BYTES: Final = 34
# By column of the table: the parts of memory, as impl.plan.memory.memory() names them, whose bytes the column adds up.
# The column "other" adds up all other parts.
_COLUMNS: Final = {
    "Adam's states": ("masters", "optimizer"),
    "gradients": ("gradients", "local_gradients"),
    "weights": ("gathered",),
}


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one rank needs at one stage of ZeRO, in bytes."""

    stage: Stage
    device: dict[str, int]  # states on the device, by column of the table
    host: dict[str, int]  # states offloaded to host memory, by column; not contained in ``device``
    activations: int  # estimated bytes of activations on the device
    between: int  # bytes that all ranks together send between nodes in a step

    @property
    def adam(self) -> int:
        """Bytes of Adam's states, on device and host together."""
        return self.device["Adam's states"] + self.host["Adam's states"]

    @property
    def training(self) -> int:
        """Peak bytes on the device in a training step: states and activations."""
        return sum(self.device.values()) + self.activations


def needs(model: nn.Module, policy: Policy, trial: Trial) -> list[Need]:
    """Predict the memory of a rank at each of ZeRO's stages 0 to 3.

    The policy's own stage is predicted with all options of the policy.  The other stages might not support some of
    these options, so the other stages are predicted

    - without hpZ's secondary shard;
    - without groups of ranks that share one copy of the states (``group``);
    - with the default of ``reduce_every``;
    - with the default limits on memory, except that padding is not limited.
    """
    stages, topology, activations = [], trial.topology(), _activation_bytes(trial, policy)
    for stage in get_args(Stage):
        variant = policy
        if stage != policy.stage:
            # Drop options that only the requested stage supports, and allow any padding.
            bare, limits = policy.without_secondary(), MemoryLimits(max_padding=math.inf)
            variant = replace(bare, stage=stage, group=0, reduce_every="stage", memory=limits)
        units = plan_units(model, topology, variant)
        held = rank_memory(variant, topology, units, trial)
        host = {part.removeprefix(HOST): size for part, size in on_host(held).items()}
        between = per_node_bytes(variant, topology, units, trial)[0] * topology.nodes
        stages.append(Need(stage, _columns(on_device(held)), _columns(host), activations, between))
    return stages


def _columns(parts: dict[str, int]) -> dict[str, int]:
    """Add up the parts of a rank's memory that share a column of the table; return the bytes of each column.

    Args:
        parts: Bytes by part of memory, such as ``masters``.  Parts that have no column of their own are added up in the
            column ``other``.
    """
    sums = {name: sum(parts.get(part, 0) for part in group) for name, group in _COLUMNS.items()}
    return {**sums, "other": sum(parts.values()) - sum(sums.values())}


def _activation_bytes(trial: Trial, policy: Policy) -> int:
    """Estimate the bytes of one rank's activations, logits and gradient of the logits in a micro-batch.

    If the estimate is wrong, it is too high rather than too low.
    """
    shape, item = shape_of(trial.model), ITEM_BYTES[policy.compute]
    assert isinstance(shape, GPTShape)  # noqa: S101  # no flag selects another kind of model
    place = trial.tokens_per_rank * shape.width
    block = _BLOCK_BYTES * place * item // 2
    recomputed = shape.layers * item * place + block
    blocks = recomputed if trial.activation_checkpointing else shape.layers * block
    return blocks + trial.tokens_per_rank * shape.vocab * (item + 2 * 4)


def table(needed: Sequence[Need], chosen: Stage, *, cuda: bool) -> str:
    """Return the table as text, with a row for each stage.

    If something is offloaded, each stage has two rows: one for the device and one for the host.

    Args:
        needed: The needs of all stages.
        chosen: The stage that will run; its row is marked.
        cuda: Whether the device is a GPU.  If not, a note says that device and host share one memory.
    """
    unit, name = (GB, "GB of 1e9") if max(need.training for need in needed) >= GB / 10 else (MB, "MB of 1e6")
    offloads = any(sum(need.host.values()) for need in needed)
    head = ["stage", *(["on"] if offloads else []), *needed[0].device, "activations*", "in a step"]
    rows = []
    for need in needed:
        mark = f"{need.stage}{' <' if need.stage == chosen else ''}"
        places = ("device", need.device, need.activations), ("host", need.host, 0)
        for place, held, kept in places if offloads else places[:1]:
            sizes = (*held.values(), kept, sum(held.values()) + kept)
            rows.append([mark, *([place] if offloads else []), *(f"{size / unit:.3f}" for size in sizes)])
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in (head, *rows)]
    lines += [
        f"In {name} bytes on each rank. The peak of a process also holds message buffers, Python and torch.",
        f"< marks stage {chosen}, which will run. * is an estimate.",
    ]
    if any(need.between for need in needed):
        sent = ", ".join(f"{in_words(need.between)} at stage {need.stage}" for need in needed)
        lines.append(f"All ranks together send between nodes in a step: {sent}.")
    if offloads:
        shared = "" if cuda else " On a CPU both are in the same memory, so add them up."
        lines.append(f"Rows host: states that are offloaded, in addition to those on the device.{shared}")
    return "\n".join(lines)


def in_words(size: float) -> str:
    """Return a number of bytes as text, such as ``1.2 GB``; a size below 0.1 GB is given in MB."""
    return f"{size / GB:.4g} GB" if size >= GB / 10 else f"{size / MB:.4g} MB"


def too_large(need: Need, topology: Topology, host: Host, *, cuda: bool, ranks: int) -> str | None:
    """Return, as text, why this machine's memory is too small for its ranks; None if it is large enough.

    With ``cuda``, each GPU must have room for the states and activations of a rank, and the machine's own memory for
    what its ranks offload.  Otherwise the machine's own memory must have room for all of this.

    Args:
        need: The memory that one rank needs.
        topology: Nodes and ranks per node of the whole run.
        host: Memory of this machine and of its GPUs.
        cuda: Whether ranks compute on GPUs.
        ranks: Number of ranks on this machine.
    """
    offloaded = sum(need.host.values())
    have = min(host.gpus, default=0)
    if cuda and need.training > have:
        needed = f"{need.training / GB:.2f} GB at stage {need.stage}"
        return f"a rank needs {needed}, and a GPU here has {have / GB:.2f} GB"
    held = offloaded if cuda else need.training + offloaded  # on a CPU, device and host share one memory
    whole = ranks * (held + PROCESS_BYTES)
    if whole <= host.memory:
        return None
    each = f"each needs {(held + PROCESS_BYTES) / GB:.2f} GB at stage {need.stage}"
    needed = f"together they need {whole / GB:.2f} GB, and this machine has {host.memory / GB:.2f} GB"
    return f"{ranks} of {topology.world} ranks run on this machine, and {each}; {needed}"
