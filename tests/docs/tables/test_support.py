"""Every combination that docs/reference/support.md allows trains like one process."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.tables import support
from impl.codecs.codec import IntCodec
from impl.policy.policy import Policy
from impl.policy.topology import Topology
from tests.support.diloco import diloco
from tests.support.models import Net
from tests.support.ranks import on_threads
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import mean_losses, model, single, train

INT8 = IntCodec(8, 32)
PARTS = support.parts(INT8, INT8, ROOMY)
FIVE = [Topology(1, 4), Topology(2, 2), Topology(2, 3), Topology(3, 2), Topology(4, 1)]
PAIRS = list(support.pairs(PARTS, EXACT))
STEPS, ACCUMULATION = 2, 2


def frozen_biases() -> Net:
    net = model()
    for block in net.blocks:
        block.up.bias.requires_grad_(requires_grad=False)
    return net


def tolerance(policy: Policy) -> float:
    """How far mean losses may be from one process's: 1e-5 where nothing is rounded, else 2 %."""
    rounds = policy.compute != "fp32" or policy.frozen is not None or policy.sums != "fp32"
    rounds = rounds or policy.secondary_format != "frames" or policy.sends_copy
    rounds = rounds or policy.weights != EXACT.weights or policy.gradients != EXACT.gradients
    return 0.02 if rounds else 1e-5


@functools.cache
def alone(world: int) -> list[float]:
    return single(frozen_biases(), world, STEPS, ACCUMULATION)


@functools.cache
def groups_alone(topology: Topology) -> list[float]:
    """One process with a model for each group, which meet after every step."""
    policy = replace(EXACT, **PARTS["local steps"])
    return diloco(frozen_biases(), policy, topology, STEPS, ACCUMULATION)[0]


def follows(topology: Topology, policy: Policy) -> None:
    policy.check(topology)
    results = on_threads(topology, train, frozen_biases(), policy, STEPS, ACCUMULATION)
    wanted = alone(topology.world) if policy.local_steps is None else groups_alone(topology)
    assert mean_losses(results) == pytest.approx(wanted, rel=tolerance(policy))


def combine(*names: str) -> Policy | str:
    return support.combine(EXACT, *(PARTS[name] for name in names))


def covering() -> list[tuple[str, ...]]:
    """Few combinations in which every accepted pair occurs: each grows from a pair that is missing."""
    missing = {frozenset(pair) for *pair, policy in PAIRS if isinstance(policy, Policy)}
    chosen = []
    for *pair, _ in PAIRS:
        if {*pair} in missing:
            names = [*pair]
            for name in PARTS:
                fits = PARTS[name].keys().isdisjoint(field for part in names for field in PARTS[part])
                new = any({name, part} in missing for part in names)
                if fits and new and isinstance(combine(*names, name), Policy):
                    names.append(name)
            missing -= set(map(frozenset, itertools.combinations(names, 2)))
            chosen.append(tuple(names))
    return chosen


@pytest.mark.parametrize("names", covering(), ids=", ".join)
def test_pairs_train(names: tuple[str, ...]) -> None:
    """Every pair that is accepted, in combinations with others, follows a single process."""
    follows(Topology(2, 2), combine(*names))


@given(st.lists(st.sampled_from(list(PARTS)), min_size=3, unique=True), st.sampled_from(FIVE))
def test_drawn_combinations_train_everywhere(names: list[str], topology: Topology) -> None:
    """On any topology, the drawn parts that go together follow a single process."""
    policy = EXACT
    for name in names:
        if name == "local steps" and topology.nodes == 1:
            continue  # one node is one group, which has no other to meet
        wider = support.combine(policy, PARTS[name])
        policy = wider if isinstance(wider, Policy) else policy
    follows(topology, policy)
