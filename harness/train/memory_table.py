"""Predicts the memory that a rank needs at each stage of ZeRO, as a table, before allocating any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from torch import nn

from harness.records.memory_parts import HOST, on_device, on_host
from harness.runs.feasibility import PROCESS_BYTES, Host
from harness.runs.predict import per_node_bytes
from harness.suites.model_sizes import GPTShape
from harness.suites.trial import Trial
from harness.workloads.preset_parameters import shape_of
from impl.codecs.codec import ITEM_BYTES
from impl.engine.unit_planning import plan_units
from impl.plan.memory import memory
from impl.plan.policy import MemoryLimits, Policy, Stage
from impl.plan.topology import Topology

GB: Final = 1e9  # as the tutorials count
MB: Final = 1e6
# kept for backward of a block in 16 bits, per token and channel: 2205.05198, eq. 1, without attention scores
_BLOCK_BYTES: Final = 34
_COLUMNS: Final = {  # of the table: parts of :func:`impl.plan.memory.memory`; the rest is "other"
    "Adam's states": ("masters", "optimizer"),
    "gradients": ("gradients", "local_gradients"),
    "weights": ("gathered",),
}


@dataclass(frozen=True, slots=True)
class Need:
    """Memory need of one rank at one stage, in bytes."""

    stage: Stage
    device: dict[str, int]  # states on the device, by the table's columns
    host: dict[str, int]  # states offloaded to host memory, not in ``device``
    activations: int  # an estimate; on the device
    between: int  # sent between nodes by all ranks in a step

    @property
    def adam(self) -> int:
        """Adam's states, on device and host."""
        return self.device["Adam's states"] + self.host["Adam's states"]

    @property
    def training(self) -> int:
        """Peak of a step on the device, which exceeds that of building the model."""
        return sum(self.device.values()) + self.activations


def needs(model: nn.Module, policy: Policy, trial: Trial) -> list[Need]:
    """Memory needs of a rank at each stage, with the rest of ``policy`` where the stage supports it."""
    stages, topology, activations = [], trial.topology(), _activation_bytes(trial, policy)
    for stage in get_args(Stage):
        variant = policy
        if stage != policy.stage:  # without options of the requested stage alone, and with any padding
            bare, limits = policy.without_secondary(), MemoryLimits(max_padding=math.inf)
            variant = replace(bare, stage=stage, group=0, reduce_every="stage", memory=limits)
        units = plan_units(model, topology, variant)
        held = memory(variant, topology, units, micro_batches=trial.accumulation)
        host = {part.removeprefix(HOST): size for part, size in on_host(held).items()}
        between = per_node_bytes(variant, topology, units, trial)[0] * topology.nodes
        stages.append(Need(stage, _columns(on_device(held)), _columns(host), activations, between))
    return stages


def _columns(parts: dict[str, int]) -> dict[str, int]:
    """Bytes of one memory by the table's columns."""
    sums = {name: sum(parts.get(part, 0) for part in group) for name, group in _COLUMNS.items()}
    return {**sums, "other": sum(parts.values()) - sum(sums.values())}


def _activation_bytes(trial: Trial, policy: Policy) -> int:
    """Upper estimate of a micro-batch's activation bytes: of blocks, logits and the logits' gradient."""
    shape, item = shape_of(trial.model), ITEM_BYTES[policy.compute]
    assert isinstance(shape, GPTShape)  # noqa: S101  # there is no flag for others
    place = trial.tokens_per_rank * shape.width
    block = _BLOCK_BYTES * place * item // 2
    recomputed = shape.layers * item * place + block
    blocks = recomputed if trial.activation_checkpointing else shape.layers * block
    return blocks + trial.tokens_per_rank * shape.vocab * (item + 2 * 4)


def table(needed: Sequence[Need], chosen: Stage, *, cuda: bool) -> str:
    """The needs of all stages as lines of text; with offload each stage has two rows, of device and host."""
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
        f"{name} bytes on each rank, without what a process's peak also holds: messages, Python and torch",
        f"<: stage {chosen}, which is asked for",
        "* an estimate",
    ]
    if any(need.between for need in needed):
        sent = ", ".join(f"{in_words(need.between)} at stage {need.stage}" for need in needed)
        lines.append(f"sent between nodes by all ranks in a step: {sent}")
    if offloads:
        lines.append(
            "host: offloaded states, beside what lies on the device"
            + ("" if cuda else "; on a CPU both are one memory, and add up")
        )
    return "\n".join(lines)


def in_words(size: float) -> str:
    """Bytes in GB or, below a tenth of one, in MB."""
    return f"{size / GB:.4g} GB" if size >= GB / 10 else f"{size / MB:.4g} MB"


def too_large(need: Need, topology: Topology, host: Host, *, cuda: bool, ranks: int) -> str | None:
    """Why this machine does not fit ``ranks`` with this need; None if it does."""
    offloaded = sum(need.host.values())
    have = min(host.gpus, default=0)
    if cuda and need.training > have:
        needed = f"{need.training / GB:.2f} GB at stage {need.stage}"
        return f"a rank needs {needed}, a GPU here has {have / GB:.2f} GB"
    held = offloaded if cuda else need.training + offloaded  # one memory
    whole = ranks * (held + PROCESS_BYTES)
    if whole <= host.memory:
        return None
    needed = f"{(held + PROCESS_BYTES) / GB:.2f} GB = {whole / GB:.2f} GB at stage {need.stage}"
    return f"{ranks} of {topology.world} ranks x {needed}, this machine has {host.memory / GB:.2f} GB"
