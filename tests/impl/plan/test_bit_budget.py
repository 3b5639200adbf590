"""Budgets of bits: a choice keeps within its budget, is never worse than one codec for all, and near the optimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import parse
from impl.plan.bit_budget import (
    BudgetError,
    Cost,
    at_most,
    bits_for,
    bytes_within,
    choose,
    shares_of,
    total,
)
from impl.plan.traffic import Decision, Event, predict
from impl.policy.policy import MemoryLimits, Policy, parse_budget
from impl.policy.presets import preset
from impl.policy.shard_layout import ParameterSpec, lay_out
from impl.policy.topology import Topology

NAMES = ("a", "b", "c")
COSTS = st.lists(
    st.fixed_dictionaries({
        name: st.builds(Cost, st.integers(1, 40), st.floats(0, 100, allow_subnormal=False)) for name in NAMES
    }),
    min_size=1,
    max_size=5,
)  # fmt: skip


@given(COSTS, st.integers(0, 200))
def test_a_choice_is_within_its_budget_and_no_worse_than_one_codec(
    parts: list[dict[str, Cost]], extra: int
) -> None:
    """Whatever the costs, a choice takes at most the budget's bytes and errs at most as any single codec that fits."""
    budget = sum(min(cost.bytes for cost in part.values()) for part in parts) + extra
    chosen = choose(parts, budget)
    spent = total(parts, chosen)
    assert spent.bytes <= budget
    for name in NAMES:
        uniform = total(parts, [name] * len(parts))
        assert uniform.bytes > budget or spent.error <= uniform.error
    assert choose(parts, budget) == chosen


@given(COSTS)
def test_an_ample_budget_gives_the_least_errors(parts: list[dict[str, Cost]]) -> None:
    """With enough bytes each part gets the codec with the smallest error."""
    budget = sum(max(cost.bytes for cost in part.values()) for part in parts)
    assert total(parts, choose(parts, budget)).error == sum(
        min(cost.error for cost in part.values()) for part in parts
    )


def test_a_budget_that_is_too_small_is_refused() -> None:
    """A budget below the smallest codecs' bytes is refused, and the error names both numbers."""
    with pytest.raises(
        BudgetError, match="a budget of 3 bytes is too small: the smallest codecs take 4"
    ) as refusal:
        choose([{"a": Cost(4, 1.0), "b": Cost(8, 0.0)}], 3)
    assert refusal.value.needed == 4


@given(st.integers(0, 10**12), st.integers(1, 10**12))
def test_the_bits_for_a_number_of_bytes_allow_them(nbytes: int, elements: int) -> None:
    """A hundredth of a bit less does not."""
    bits = bits_for(nbytes, elements)
    assert bytes_within(bits, elements) >= nbytes
    assert nbytes == 0 or bytes_within((round(bits * 100) - 1) / 100, elements) < nbytes


CODECS = ("int2:32", "int3:32", "int6:32", "int8:64", "bf16")


@given(
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=5),
    topology=st.sampled_from([Topology(2, 2), Topology(3, 1), Topology(4, 2)]),
    name=st.sampled_from(["zero2", "zero3", "hpz"]),
    chunks=st.integers(1, 4),
    draw=st.data(),
)
def test_a_policys_budget_bounds_a_step(
    *, sizes: list[int], topology: Topology, name: str, chunks: int, draw: st.DataObject
) -> None:
    """Chosen codecs keep within the budget, err at most as the policy's, and a step sends at most what is predicted."""
    initial = {"weights": parse("int4:32"), "gradients": (parse("int8:64"), parse("int4:32"))}
    budget = parse_budget(f"weights gradients every 1 of {' '.join(CODECS)}")
    policy = preset(name, **initial, budget=budget, chunks=chunks, memory=MemoryLimits(max_padding=1e9))
    units = [
        lay_out(f"u{number}", [ParameterSpec("w", (size,))], grain=policy.grain, world=topology.world,
                max_padding=1e9)
        for number, size in enumerate(sizes)
    ]  # fmt: skip
    decisions: list[Decision] = []
    for share in shares_of(policy, topology, units):
        errors = [[draw.draw(st.floats(0, 1e6)) for _ in share.codecs] for _ in units]
        chosen = share.choose(errors)
        spent = [sizes[number] for sizes, number in zip(share.bytes, chosen, strict=True)]
        assert sum(spent) <= share.limit == sum(sizes[0] for sizes in share.bytes)
        erred = sum(row[number] for row, number in zip(errors, chosen, strict=True))
        assert erred <= sum(row[0] for row in errors)
        decisions += [
            Decision(1, share.purpose, unit, share.hop, share.codecs[number], 0.0)
            for unit, number in zip(share.units, chosen, strict=True)
        ]
    step: list[Event] = ["forward", "backward", "step"]
    for rank in range(topology.world):
        once = predict(policy, topology, units, rank, step, decisions=decisions).sent
        twice = predict(policy, topology, units, rank, step * 2, decisions=decisions).sent
        sent = {"inter": 0, "intra": 0}
        for key, (nbytes, _) in twice.items():
            sent[key.link] += nbytes - once[key].bytes
        most = at_most(policy, topology, units, {key: nbytes for key, (nbytes, _) in once.items()})
        assert sent["inter"] <= most["inter"]
        assert sent["intra"] <= most["intra"]


def test_bits_count_what_crosses_nodes_in_a_step() -> None:
    """5 bits for each of a rank's 2048 elements are 2560 bytes for two gathers and 1280 for a reduction."""
    policy = Policy(
        weights=parse("int4:32"),
        gradients=(parse("int4:32"), parse("int4:32")),
        budget=parse_budget("weights 5 gradients 5 every 1 of int2:32"),
        memory=MemoryLimits(max_reuse=0),
    )
    unit = lay_out("u", [ParameterSpec("w", (4096,))], grain=32, world=2, max_padding=0)
    weights, gradients = shares_of(policy, Topology(2, 1), [unit])
    assert (weights.limit, gradients.limit) == (2 * 2048 * 5 // 8, 2048 * 5 // 8)
    assert weights.bytes == ((2 * 1280, 2 * 768),)
    assert gradients.bytes == ((1280, 768),)
