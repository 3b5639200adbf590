"""What a model needs of a rank's memory at each stage of ZeRO, before any of it is allocated.

Bytes of states are those of :func:`impl.traffic.memory`, from the model's layout on the meta device;
activations are an estimate, and said to be one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from torch import nn

from harness.flops import GPTShape
from harness.memory import on_device, on_host
from harness.plan import PROCESS_BYTES, Host
from impl.blocks import plan_units
from impl.codec import ITEM_BYTES
from impl.policy import MemoryLimits, Policy, Stage
from impl.topology import Topology
from impl.traffic import memory

GB: Final = 1e9  # as the tutorials count
MB: Final = 1e6
_BLOCK_BYTES: Final = 34  # kept for backward of a block in 16 bits, per token and channel (2205.05198, eq. 1)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one rank needs at one stage.

    Attributes:
        stage: of ZeRO.
        adam: fp32 weights and two moments: 12 bytes for each of a rank's elements.
        gradients: mean gradients of a rank's shard, fp32.
        local: gradients that wait to be reduced.
        gathered: weights in the type that is computed in.
        other: what the policy keeps beside them: hpZ's copy, carried errors, frozen codes.
        activations: an estimate.
        offloaded: to host memory; in none of the others.
    """

    stage: Stage
    adam: int
    gradients: int
    local: int
    gathered: int
    other: int
    activations: int
    offloaded: int

    @property
    def training(self) -> int:
        """All of a step, on the device: more than masters and one whole block, while it is built."""
        return self.adam + self.gradients + self.local + self.gathered + self.other + self.activations


def needs(
    model: nn.Module, policy: Policy, topology: Topology, *, micro_batches: int, activations: int
) -> list[Need]:
    """What a rank needs at stages 0 to 3, with the rest of ``policy`` where a stage can have it.

    Args:
        model: on the meta device.
        policy: of the stage that is asked for.
        topology: where ranks stand.
        micro_batches: of a step.
        activations: bytes, see :func:`activation_bytes`.

    Raises:
        PolicyError, GeometryError, ZeroError: if the model cannot be laid out as the policy asks.
    """
    found = []
    for stage in get_args(Stage):
        at = _at(policy, stage)
        held = memory(at, topology, plan_units(model, topology, at), micro_batches=micro_batches)
        parts = on_device(held)
        counted = ("masters", "optimizer", "gradients", "local_gradients", "gathered")
        found.append(
            Need(
                stage=stage,
                adam=parts["masters"] + parts["optimizer"],
                gradients=parts["gradients"],
                local=parts["local_gradients"],
                gathered=parts["gathered"],
                other=sum(size for name, size in parts.items() if name not in counted),
                activations=activations,
                offloaded=sum(on_host(held).values()),
            )
        )
    return found


def _at(policy: Policy, stage: Stage) -> Policy:
    """The policy at another stage, without what only its own has, and however much that would be padded."""
    if stage == policy.stage:
        return policy
    limits = MemoryLimits(max_padding=math.inf)
    return replace(policy, stage=stage, group=0, secondary=0, reduce_every="stage", memory=limits)


def activation_bytes(shape: GPTShape, policy: Policy, *, sequences: int, length: int, recompute: bool) -> int:
    """An estimate of what a micro-batch keeps for its backward pass, at most.

    A block keeps about 34 bytes a token and channel in 16 bits (2205.05198 without the attention's scores,
    which the fused kernel does not keep); recomputed ones keep their input, and one at a time all of it.  The
    logits and their gradient come on top, in the type computed in and in fp32.

    Args:
        shape: of the model.
        policy: for the type that is computed in.
        sequences: of a micro-batch.
        length: tokens of a sequence.
        recompute: whether blocks are run again in the backward pass.
    """
    item = ITEM_BYTES[policy.compute]
    place = sequences * length * shape.width
    block = _BLOCK_BYTES * place * item // 2
    blocks = shape.layers * item * place + block if recompute else shape.layers * block
    return blocks + sequences * length * shape.vocab * (item + 2 * 4)


def table(found: Sequence[Need], chosen: Stage) -> str:
    """The needs as lines of text, in GB of 1e9 bytes, or MB for models that need little."""
    unit, name = (GB, "GB of 1e9") if max(need.training for need in found) >= GB / 10 else (MB, "MB of 1e6")
    offloads = any(need.offloaded for need in found)
    head = (
        "stage",
        "Adam's states",
        "gradients",
        "weights",
        "other",
        "activations*",
        *(("on the host",) if offloads else ()),
        "in a step",
    )
    rows = [
        (
            f"{need.stage}{' <' if need.stage == chosen else ''}",
            *(
                f"{size / unit:.3f}"
                for size in (
                    need.adam, need.gradients + need.local, need.gathered, need.other, need.activations,
                    *((need.offloaded,) if offloads else ()), need.training,
                )
            ),
        )
        for need in found
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]
    lines += [
        f"{name} bytes on each rank, without buffers of messages",
        "* an estimate",
    ]
    return "\n".join(lines)


def too_large(need: Need, topology: Topology, host: Host, *, cuda: bool, here: int) -> str | None:
    """Why ranks that need so much do not fit this machine; None if they do.

    Args:
        need: of one rank.
        topology: of all ranks.
        host: this machine.
        cuda: whether states lie on GPUs.
        here: ranks on this machine.
    """
    held = need.training + need.offloaded  # one memory
    if cuda:
        have = min(host.gpus, default=0)
        if need.training > have:
            return (
                f"a rank needs {need.training / GB:.2f} GB at stage {need.stage}, a GPU here has "
                f"{have / GB:.2f} GB"
            )
        held = need.offloaded
    whole = here * (held + PROCESS_BYTES)
    if whole <= host.memory:
        return None
    each = (held + PROCESS_BYTES) / GB
    return (
        f"{here} of {topology.world} ranks x {each:.2f} GB = {whole / GB:.2f} GB at "
        f"stage {need.stage}, this machine has {host.memory / GB:.2f} GB"
    )
