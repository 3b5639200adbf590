"""Configurations: no two policies that move or keep different things share a name."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from harness.suites.peers import PEERS
from harness.suites.trial import PolicyChanges, Trial
from impl.codecs.codec import BF16, FP32
from impl.policy.policy import MemoryLimits, Offload, Policy, parse_budget, parse_feedback, parse_loss_scale
from impl.policy.presets import PRESETS
from impl.policy.spans import Span
from report.data.configuration import NAMES, differences_of, fields_of, label_of

LAYOUT = {"align"}  # it changes the layout alone


def test_every_field_of_a_policy_tells_configurations_apart() -> None:
    """A change of any field of a policy changes the fields that tell configurations apart."""
    trial = Trial()
    others = {
        "weights": PRESETS["exact"].weights,
        "gradients": PRESETS["exact"].gradients,
        "gather": "flat",
        "reduce": "one_hop",
        "chunks": 4,
        "secondary": 1,
        "feedback": parse_feedback("loco"),
        "sums": "fp16",
        "blocks": "shape",
        "budget": parse_budget("gradients every 5 of int4:32"),
        "stage": 2,
        "group": "node",
        "compute": "bf16",
        "loss_scale": parse_loss_scale("dynamic"),
        "frozen": PRESETS["zeropp"].weights,
        "reduce_every": "step",
        "order_every": 7,
        "owned": (BF16, PRESETS["zeropp"].weights),
        "schedule": (Span(until=2, chunks=2), Span()),
        "memory": replace(PRESETS["zero3"].memory, prefetch=1),
        "offload": Offload(optimizer=1.0),
    }
    of_copy = {"secondary_format": "bf16", "inside": BF16, "differences": BF16, "refresh": 3}
    of_groups = {"local_steps": 3, "local_fragments": 2, "outer_rate": 1.0, "outer_momentum": 0.0}
    told = others.keys() | LAYOUT | of_copy.keys() | of_groups.keys() | {"planes"}
    assert told == {field.name for field in fields(Policy)}
    usual = fields_of(PRESETS["zero3"], trial.topology())
    for name, value in others.items():
        assert fields_of(replace(PRESETS["zero3"], **{name: value}), trial.topology()) != usual, name
    planes = PRESETS["mxfp8-planes"]
    for value in (1, "phase"):
        changed = replace(planes, planes=value)  # type: ignore[arg-type]
        assert fields_of(planes, trial.topology()) != fields_of(changed, trial.topology())
    hpz = PRESETS["hpz"]
    for name, value in of_copy.items():
        base = replace(hpz, differences=FP32) if name == "refresh" else hpz
        changed = replace(base, **{name: value})
        assert fields_of(changed, trial.topology()) != fields_of(base, trial.topology()), name
    apart = replace(PRESETS["mics"], local_steps=4)
    for name, value in of_groups.items():
        changed = replace(apart, **{name: value})
        assert fields_of(changed, trial.topology()) != fields_of(apart, trial.topology()), name
    assert label_of(Trial(policy=PolicyChanges(secondary_format="bf16")), {}) == "ZeRO++ (hpZ copy bf16)"
    for limit in fields(MemoryLimits):
        if limit.name != "max_padding":
            memory = replace(PRESETS["zero3"].memory, **{limit.name: 7})
            assert fields_of(replace(PRESETS["zero3"], memory=memory), trial.topology()) != usual, limit.name


def test_names_of_deepspeeds_configurations_have_their_settings() -> None:
    """Stage, techniques and limits; two that differ in any of them have two names."""

    def label(strategy: str = "recipe", **zero: object) -> str:
        config = json.dumps({"zero_optimization": zero})
        return label_of(Trial(strategy=strategy, deepspeed_config=config), {})

    assert label(stage=3) == "DeepSpeed configuration (stage 3)"
    quantised = label(stage=3, zero_quantized_weights=True, zero_quantized_gradients=True)
    assert "w int8:2048" in quantised
    assert "g int4:256" in quantised
    names = {label(stage=3), quantised, label(stage=2), label(stage=3, reduce_bucket_size=1000)}
    assert len(names) == 4
    # DeepSpeed's name has settings beside stage 3; every peer's has the type in which it computes.
    assert label_of(Trial(strategy="deepspeed"), {}) == "DeepSpeed"
    by_hpz = label("deepspeed", stage=3, zero_hpz_partition_size=2)
    assert by_hpz == "DeepSpeed (zero_hpz_partition_size 2)"
    fsdp2 = Trial.model_validate({"strategy": "fsdp2-kept", "peer": {"compute": "bf16"}})
    assert label_of(fsdp2, {"compute": "bf16"}) == "FSDP2, kept (compute bf16)"
    assert set(PEERS) <= set(NAMES)


def test_large_round_numbers_are_short_in_names() -> None:
    """Of a policy and of a library's settings, in names and in differences; numbers that are not round stay whole."""

    def kept(most: int) -> Trial:
        return Trial.model_validate({"strategy": "zero3", "policy": {"max_reuse": most}})

    assert label_of(kept(1_000_000_000), {}) == "ZeRO-3 (max reuse 1e9)"
    assert label_of(kept(1_000_000_001), {}) == "ZeRO-3 (max reuse 1000000001)"
    assert differences_of(kept(2_500_000), Trial(strategy="zero3")) == "max reuse 2.5e6"
    config = json.dumps({"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 1_000_000_000}})
    deepspeed = Trial(strategy="deepspeed", deepspeed_config=config)
    assert label_of(deepspeed, {}) == "DeepSpeed (stage3_max_reuse_distance 1e9)"


@pytest.mark.parametrize(("field", "arguments"), [("reduce", "method"), ("gather", "gather_method")])
def test_names_of_a_users_classes_leave_out_their_modules(field: str, arguments: str) -> None:
    """A reduction and a gather of a user's own are named by class and arguments, in names and in differences."""
    policy = {field: "mine.own:Class"}
    trial = Trial.model_validate({"strategy": "zero3", "policy": policy, arguments: {"block": 64}})
    assert label_of(trial, {}) == f"ZeRO-3 ({field} Class(block=64))"
    assert differences_of(trial, Trial(strategy="zero3")) == f"{field} Class(block=64)"
