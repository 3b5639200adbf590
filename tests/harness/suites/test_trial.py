"""A trial's identity, and what its text forms resolve to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError, create_model

from harness.suites.parse_quantity import parse_rate
from harness.suites.peers import PEERS
from harness.suites.trial import (
    KEYS,
    Cluster,
    LearningRates,
    Optimizer,
    PeerSettings,
    PolicyChanges,
    Trial,
    _key,
)
from impl.codecs.codec import Raw
from impl.policy.policy import MemoryLimits, Offload, Policy, PolicyError
from impl.policy.presets import PRESETS

integers = r"int[2-8]:([1-9][0-9]{0,2}|[1-3][0-9]{3}|shard)(:asym)?"
codecs = st.sampled_from(["fp32", "bf16", "fp16"]) | st.from_regex(integers, fullmatch=True)
rates = st.sampled_from([None, "unshaped"]) | st.from_regex("[1-9][0-9]{0,2} [kMG]bit/s", fullmatch=True)
trials = st.builds(
    Trial,
    strategy=st.sampled_from([*PEERS, *PRESETS]),
    policy=st.builds(
        PolicyChanges,
        weights=st.none() | codecs,
        gradients=st.none() | codecs | st.tuples(codecs, codecs),
        align=st.integers(1, 4096),
    ),
    cluster=st.builds(Cluster, nodes=st.integers(1, 64), ranks_per_node=st.integers(1, 16), rate=rates),
    peer=st.builds(PeerSettings, compute=st.sampled_from(["fp32", "bf16"])),
    workload=st.sampled_from(["train", "generate"]),
    memory_limit=st.sampled_from([None, "64 MiB", "1.5 GiB"]),
    seed=st.integers(0, 2**63 - 1),
    repeat=st.integers(0, 100),
)


@given(trials)
def test_round_trip(trial: Trial) -> None:
    """A trial is restored from its canonical JSON, with the same id."""
    again = Trial.from_canonical(trial.canonical())
    assert again == trial
    assert again.id == trial.id


@given(trials, trials)
def test_ids(trial: Trial, other: Trial) -> None:
    """Two trials have the same id exactly if they are equal."""
    assert (trial.id == other.id) == (trial == other)


@given(st.integers(1, 1000))
def test_units(number: int) -> None:
    """A quantity has the same value in all its units, and is a plain number in the canonical form."""
    assert parse_rate(f"{number} Mbit/s") == number
    assert parse_rate(f"{number * 1000} kbit/s") == pytest.approx(number)
    assert parse_rate(f"{number} Gbit/s") == number * 1000
    assert parse_rate("unshaped") is None
    for unit, size in (("MiB", 2**20), ("GiB", 2**30)):
        trial = Trial(memory_limit=f"{number} {unit}")  # type: ignore[arg-type]
        assert trial.memory_limit == number * size
        assert Trial.from_canonical(trial.canonical()) == trial


@pytest.mark.parametrize(
    "value", [50, "50", "50 Mbps", "0 Mbit/s", "-1 Mbit/s", "", True, "0.5 kbit/s", "100001 Gbit/s", "64 MB"]
)
def test_other_quantities_are_refused(value: object) -> None:
    """Quantities without a known unit, of zero, or beyond any link are refused; the message names the allowed ones."""
    for fields, message in (
        (
            {"cluster": {"rate": value}},
            "kbit/s, Mbit/s or Gbit/s, from 1 kbit/s to 100,000 Gbit/s, or 'unshaped'",
        ),
        ({"memory_limit": value}, "a number above 0 with the unit MiB or GiB"),
    ):
        with pytest.raises(ValidationError, match=message):
            Trial.model_validate(fields)


def test_frames_are_what_is_kept_unless_said_otherwise() -> None:
    """Setting hpZ's copy to its default, frames, changes no id; in 16 bits it is another trial, and recorded so."""
    plain, frames, other = (
        Trial(policy=PolicyChanges(secondary_format=kept)) for kept in (None, "frames", "bf16")
    )
    assert plain.id == frames.id != other.id
    assert Trial.from_canonical(other.canonical()) == other
    policy = other.resolved_policy()
    assert policy is not None
    assert policy.secondary_format == "bf16"


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    """A strategy without changes is its preset."""
    assert Trial(strategy=name).resolved_policy() == PRESETS[name]


@given(codecs)
@example("int4:shard")
def test_one_codec_for_both_hops(text: str) -> None:
    """A single gradient codec is used in both hops; a pair gives one for each."""
    single = Trial(strategy="zero3", policy=PolicyChanges(gradients=text)).resolved_policy()
    pair = Trial(strategy="zero3", policy=PolicyChanges(gradients=(text, "fp32"))).resolved_policy()
    assert single is not None
    assert pair is not None
    assert single.gradients == (single.gradients[0],) * 2
    assert pair.gradients == (single.gradients[0], Raw("fp32"))


def test_every_field_of_a_policy_can_be_said() -> None:
    """A suite can change every field of policies and of their limits."""
    named = {field.name for kind in (Policy, MemoryLimits) for field in dataclasses.fields(kind)}
    shares = {f"offload_{field.name}" for field in dataclasses.fields(Offload)}
    assert set(PolicyChanges.model_fields) == named - {"memory", "offload", "inside"} | shares
    by_hop = Trial(strategy="hpz", policy=PolicyChanges(weights=("int8:64", "bf16"))).resolved_policy()
    assert by_hop is not None
    assert (str(by_hop.inside), str(by_hop.weights)) == ("int8:64", "bf16")
    changes: dict[str, Any] = {
        "stage": 2, "group": "node", "compute": "fp16", "loss_scale": "dynamic:window7", "frozen": "int8:64",
        "reduce_every": "step", "max_live": 1, "max_reuse": 2, "persist_below": 3, "reduce_bucket": 4,
        "order_every": 5, "persist_most": 6, "largest_unit": 7, "offload_optimizer": 0.5,
        "offload_weights": 0.25,
    }  # fmt: skip
    trial = Trial(strategy="zero3", policy=PolicyChanges(**changes))
    policy = trial.resolved_policy()
    assert policy is not None
    for name, value in changes.items():
        part = policy.memory if hasattr(policy.memory, name) else policy.offload if "offl" in name else policy
        setting = getattr(part, name.removeprefix("offload_"))
        assert (str(setting) if isinstance(value, str) else setting) == value
    assert Trial.from_canonical(trial.canonical()) == trial


def test_impossible_policy() -> None:
    """A policy that no topology could run is refused when it is resolved."""
    with pytest.raises(PolicyError, match="hpZ"):
        Trial(strategy="hpz", policy=PolicyChanges(gather="flat")).resolved_policy()


def test_what_came_later_changes_no_id() -> None:
    """A trial that does not use fields that were added later has the id that it had before."""
    assert Trial().id == "0dc9ea488555"
    assert not {"workload", "generate", "memory_limit", "control"} & set(Trial().canonical())
    assert Trial(control="half_batch").id != Trial().id
    assert Trial(activation_checkpointing=True).id != Trial().id
    assert Trial(optimizer=Optimizer(schedule=LearningRates(decay="cosine"))).id != Trial().id
    assert Trial(tokenizer="mine:words").id != Trial().id
    assert {"workload", "generate"} <= set(Trial(workload="generate").canonical())
    assert Trial(policy=PolicyChanges(stage=2)).canonical()["policy"]["stage"] == 2
    for strategy, *types in (("zeropp", "fp32", "fp16"), ("zeropp-shipped", "fp16", "fp32")):
        same, changed = (Trial(strategy=strategy, policy=PolicyChanges(sums=sums)) for sums in types)  # type: ignore[arg-type]
        assert same.id == Trial(strategy=strategy).id != changed.id
        assert Trial.from_canonical(changed.canonical()) == changed


@pytest.mark.parametrize(
    ("host", "kept"),
    [
        *(
            (name, name)
            for name in ("node1", "me@node-1.site", "10.0.0.1", "a_b", "::1", "fe80::1%eth0", "me@fd00::1")
        ),
        ("[::1]", "::1"),
        ("me@[fd00::1]", "me@fd00::1"),
    ],
)
def test_hosts(host: str, kept: str) -> None:
    """Hosts may be names or addresses of both kinds, and may follow a user."""
    assert Cluster(launcher="hosts", hosts=(host,)).hosts == (kept,)


def test_a_peer_s_later_settings_leave_ids_as_they_were() -> None:
    """A trial in bf16 has the id that it had when the type was a peer's only setting."""
    assert Trial(strategy="fsdp2", peer=PeerSettings(compute="bf16")).id == "cce4593dd144"
    assert Trial(strategy="fsdp2", peer=PeerSettings(compute="bf16", group="node")).canonical()["peer"] == {
        "compute": "bf16",
        "group": "node",
    }


@pytest.mark.parametrize(
    "host",
    ["", "-oProxyCommand=x", "-x@node1", "me@-node", "a b", "a;b", "::g", "[::1", "1::2::3", "a:22", "me@"],
)
def test_what_is_no_host(host: str) -> None:
    """Options of ssh, shell syntax and ports are refused in words."""
    with pytest.raises(ValidationError, match="expected a host name or address for ssh, such as"):
        Cluster(launcher="hosts", hosts=(host,))


@pytest.mark.parametrize("allowed", [True, False])
def test_a_key_can_allow_none(*, allowed: bool) -> None:
    """A setting with ``or_none`` takes a suite's ``"none"`` for no value; others refuse it."""
    kind, field = _key(dataclasses.replace(KEYS["refresh"], or_none=allowed))
    keys = create_model("keys", steps=(kind, field))
    assert keys(steps=3).model_dump() == {"steps": 3}
    if allowed:
        assert keys(steps="none").model_dump() == {"steps": None}
    for value in [-1] if allowed else [-1, "none"]:
        with pytest.raises(ValidationError):
            keys(steps=value)
