"""Defines presets, policies with a name: ZeRO's stages, ZeRO++'s techniques alone and combined, and later methods.

Pure: no torch.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final

from impl.codecs.codec import FP32, MX_BLOCK, FloatCodec, IntCodec, OwnCodec
from impl.policy.policy import Policy, PolicyError
from impl.policy.policy_parts import FEEDBACKS

_INT8 = IntCodec(8, 2048)
_INT4 = (IntCodec(4, 256, clipped=True),) * 2  # clipping gives smaller errors with 4 bits, not with 8
_BF16SR = OwnCodec("bf16sr")
_MIN_MAX = IntCodec(8, 1024, asymmetric=True, stochastic=True)
_SHIPPED = Policy(
    weights=replace(_INT8, clipped=True), secondary="node", secondary_format="bf16", gradients=_INT4
)

TECHNIQUES: Final[dict[str, Policy]] = {
    "exact": Policy(weights=FP32, gradients=(FP32, FP32)),
    "zero0": Policy(stage=0),
    "zero1": Policy(stage=1),
    "zero2": Policy(stage=2),
    "zero3": Policy(),
    "zero3-flat": Policy(gather="flat", reduce="ring"),
    "mics": Policy(group="node"),
    "qwz": Policy(weights=_INT8),
    "hpz": Policy(secondary="node"),
    "qgz": Policy(gradients=_INT4),
    "qwz+hpz": Policy(weights=_INT8, secondary="node"),
    "qwz+qgz": Policy(weights=_INT8, gradients=_INT4),
    "hpz+qgz": Policy(secondary="node", gradients=_INT4),
    "zeropp": Policy(weights=_INT8, secondary="node", gradients=_INT4),
}
"""Policies by name:

- ``exact``: ZeRO-3 with all messages in fp32;
- ``zero0`` to ``zero3``: the ZeRO stages with messages in 16 bits; ``zero3`` is the baseline;
- ``zero3-flat``: the ZeRO++ paper's baseline, whose collectives are one ring over all ranks, whatever their nodes;
- ``mics``: ZeRO-3 that shards inside a node only;
- all others: each technique of ZeRO++, each pair of techniques, and all three together (``zeropp``).
"""

SUCCESSORS: Final[dict[str, Policy]] = {
    # ZeRO++ with two more of DeepSpeed's choices: its scale rule for weights too, and hpZ's copy in 16 bits.
    "zeropp-deepspeed": _SHIPPED,
    # In addition, DeepSpeed's fp16 sums and block sizes.  Four things still differ from DeepSpeed: here scales are sent
    # in the same message as the codes; gradients are averaged correctly (DeepSpeed's mean is larger by a factor of the
    # ranks per node); vectors are quantised like the matrices of their unit; and no tensor is sent unquantised because
    # of its size.
    "zeropp-shipped": replace(_SHIPPED, sums="fp16", blocks="shape"),
    # LoCo (2407.04480): ZeRO++ with a moving average of the errors of both hops.
    "loco": Policy(weights=_INT8, secondary="node", gradients=_INT4, feedback=FEEDBACKS["loco"]),
    # SDP4Bit (2410.15526): differences of weights in 4 bits; gradients in 8 bits inside nodes and, after a
    # Hadamard rotation, in 4 bits between them.
    "sdp4bit": Policy(
        secondary="node",
        differences=IntCodec(4, 2048, stochastic=True),
        gradients=(IntCodec(8, 128, stochastic=True), IntCodec(4, 128, hadamard=32, stochastic=True)),
    ),
    # QSDP (2302.02390): 8 bits with minimum and maximum of every 1024 elements, unbiased rounding.
    "qsdp": Policy(weights=_MIN_MAX, gradients=(_MIN_MAX, _MIN_MAX)),
    # Gradients in bf16 by stochastic rounding, summed in fp32, as in torchcomms, but in two hops.
    "bf16-fp32sum": Policy(gradients=(_BF16SR, _BF16SR)),
    # Weights in 8-bit floats with one scale for a shard, where torchao has one for a tensor.
    "fp8-gather": Policy(weights=FloatCodec("e4m3", "shard")),
    # Weights in MXFP4, in which Megatron gathers 4-bit parameters.
    "fp4-gather": Policy(weights=FloatCodec("e2m1", MX_BLOCK, scale="e8m0")),
    # Weights in MXFP8 along rows and along columns in every gather, as in Megatron-FSDP, which keeps vectors in
    # 16 bits.  With ``planes="phase"``, as in Megatron-FSDP's v2, the values are the same and gathers send half as many
    # bytes.
    "mxfp8-planes": Policy(weights=FloatCodec("e4m3", MX_BLOCK, scale="e8m0"), planes=2),
}
"""Policies for methods that others published.

Megatron's HFSDP (ZeRO-3 inside a node, ZeRO-1 across nodes) places weights and states as ``hpz`` does.
"""

PRESETS: Final = TECHNIQUES | SUCCESSORS


def preset(name: str, **changes: object) -> Policy:
    """Returns the preset policy with this ``name``, with the fields in ``changes`` replaced.

    Raises PolicyError: for an unknown name or an unknown field.
    """
    if name not in tuple(PRESETS):  # a tuple, so that names that cannot be hashed are refused too
        raise PolicyError(f"unknown policy {name!r}: expected one of {', '.join(PRESETS)}")
    names = sorted(field.name for field in fields(Policy))
    if unknown := [name for name in changes if name not in names]:
        raise PolicyError(f"unknown policy field {unknown[0]!r}: expected one of {', '.join(names)}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]  # checked by Policy itself
