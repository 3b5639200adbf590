"""Reinforcement learning from a reward model: what a step learns from, and what each phase sends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.step_clock import StepClock
from harness.records.trial_record import LedgerRow, Record
from harness.runs.feasibility import any_host, forecast
from harness.runs.predict import units_of
from harness.strategies.training_loop import collect
from harness.suites.trial import Trial
from harness.workloads.masked_text import NO_TARGET
from harness.workloads.rank_batches import RankBatches
from harness.workloads.reinforcement import (
    Experience,
    actor_of,
    group_advantages,
    grpo_loss,
    judges_of,
    sampler,
    targets_of,
)
from impl.plan.traffic import Event, passes, predict
from impl.policy.shard_layout import FROZEN, UnitGeometry
from tests.harness.runs.test_rank_trial import result
from tests.harness.workloads import test_generation

PROMPT, TOKENS, STEPS = 11, 5, 2
fp32 = st.floats(-1e6, 1e6, width=32)


def trial(strategy: str, **changes: Any) -> Trial:
    sizes = {"sequence": PROMPT + TOKENS, "tokens_per_rank": 6 * (PROMPT + TOKENS), "rlhf": {"group": 3}}
    generated = {"workload": "rlhf", "generate": {"prompt": PROMPT, "tokens": TOKENS}}
    return test_generation.trial(strategy, **sizes | generated | changes)


@st.composite
def groups(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Rewards of whole groups, and how many there are in one."""
    group, count = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    rewards = draw(st.lists(fp32, min_size=group * count, max_size=group * count))
    return torch.tensor(rewards), group


@given(groups())
def test_advantages_of_a_group_are_centred_bounded_and_in_the_order_of_its_rewards(
    drawn: tuple[torch.Tensor, int],
) -> None:
    """Their mean is 0, none is beyond the root of the group's size, and more reward is no less advantage."""
    rewards, group = drawn
    for gain, reward in zip(group_advantages(*drawn).view(-1, group), rewards.view(-1, group), strict=True):
        assert abs(float(gain.double().mean())) < 1e-6
        assert float(gain.abs().max()) <= group**0.5
        assert bool((gain[reward.argsort()].diff() >= 0).all())


@given(fp32, st.integers(2, 9), st.integers(1, 4), st.integers(0, 99))
def test_a_constant_reward_gives_no_gradient(reward: float, group: int, count: int, seed: int) -> None:
    """All advantages are 0, exactly, and with them the gradient at the reference."""
    advantages = group_advantages(torch.full((group * count,), reward), group)
    assert not advantages.any()
    logs = -torch.rand(group * count, 4, generator=torch.Generator().manual_seed(seed))
    learnt = logs.clone().requires_grad_()
    targets = torch.zeros_like(logs, dtype=torch.int64)
    grpo_loss(learnt, Experience(targets, advantages, logs, kl=0.5)).backward()
    assert learnt.grad is not None
    assert not learnt.grad.any()


@given(groups(), st.floats(0, 2), st.integers(0, 99))
def test_the_loss_has_the_gradient_of_the_ratio_and_of_the_divergence(
    drawn: tuple[torch.Tensor, int], kl: float, seed: int
) -> None:
    """It is that of the mean over written tokens of kl * D - ratio * advantage, and prompts have none."""
    advantages, random = group_advantages(*drawn), torch.Generator().manual_seed(seed)
    logs, reference = -3 * torch.rand(2, len(advantages), 6, generator=random)
    targets = torch.zeros_like(logs, dtype=torch.int64)
    targets[:, :2] = NO_TARGET
    learnt, expected = logs.clone().requires_grad_(), logs.clone().requires_grad_()
    grpo_loss(learnt, Experience(targets, advantages, reference, kl)).backward()
    ratio = (expected - logs).exp()
    log_ratio = reference - expected
    divergence = log_ratio.exp() - log_ratio - 1
    assert bool((divergence >= -1e-6).all())
    (kl * divergence - ratio * advantages[:, None])[:, 2:].mean().backward()
    assert learnt.grad is not None
    assert torch.allclose(learnt.grad, expected.grad, atol=1e-6)  # type: ignore[arg-type]
    assert not learnt.grad[:, :2].any()


@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 5))
def test_targets_are_the_next_tokens_after_the_prompt(count: int, prompt: int, written: int) -> None:
    """As many as were written, each at the place of the token before it."""
    sequences = torch.arange(count * (prompt + written)).view(count, -1)
    targets = targets_of(sequences, prompt)
    assert bool((targets[:, : prompt - 1] == NO_TARGET).all())
    assert torch.equal(targets[:, prompt - 1 :], sequences[:, prompt:])


def test_draws_follow_from_seed_step_and_rank() -> None:
    """The same three draw the same tokens; another rank, step or seed draws others."""
    logits = torch.zeros(64, 256)
    keys = (0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)
    drawn = [sampler(*key)(logits).tolist() for key in keys]
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn}) == 4


def test_continuations_of_a_group_begin_with_one_prompt_of_the_corpus() -> None:
    """Each group continues the beginning of a sequence that was drawn; the actor began as the reference."""
    rlhf = trial("zero3")
    torch.manual_seed(rlhf.seed)
    data, actor = RankBatches(rlhf, 0, torch.device("cpu")), actor_of(rlhf)
    judges = judges_of(rlhf, actor)
    batch = collect(rlhf, data, actor, judges, rank=0, index=0, clock=StepClock())
    tokens, experience = batch.batch
    ((read, _),) = batch.drawn
    prompts = tokens[:, :PROMPT].view(-1, 3, PROMPT)
    assert torch.equal(prompts, read[: len(prompts), None, :PROMPT].expand_as(prompts))
    logs = actor.log_probabilities(tokens, experience.targets)
    assert torch.equal(logs, experience.reference)
    assert not any(parameter.requires_grad for parameter in judges.parameters())


def test_an_actor_learns_to_write_what_is_rewarded() -> None:
    """The mean reward of a batch rises within some steps of one process."""
    rlhf = trial("zero3", tokens_per_rank=60 * (PROMPT + TOKENS), rlhf={"group": 10, "kl": 0.0})
    torch.manual_seed(0)
    data, actor = RankBatches(rlhf, 0, torch.device("cpu")), actor_of(rlhf)
    judges, rewards = judges_of(rlhf, actor), list[float]()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3)
    judges.register_forward_hook(lambda _, __, scores: rewards.append(float(scores[1].mean())))
    for index in range(30):
        batch = collect(rlhf, data, actor, judges, rank=0, index=index, clock=StepClock())
        optimizer.zero_grad()
        actor(*batch.batch).backward()
        optimizer.step()
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def _phase(row: LedgerRow) -> str:
    if row.phase == "evaluate":
        return "score" if row.unit.endswith(FROZEN) else "generate"
    return "train"


def _between(trial: Trial, units: list[UnitGeometry], rank: int, load: list[Event]) -> int:
    policy = trial.resolved_policy()
    assert policy is not None
    sent = predict(policy, trial.topology(), units, rank, load).sent
    return sum(count.bytes for key, count in sent.items() if key.link == "inter")


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("zero3", {"activation_checkpointing": True}),
        ("qwz", {"clip": 1.0}),
        ("hpz", {}),
        ("zeropp", {"policy": {"max_padding": 1.0, "frozen": "int4:64"}}),
        ("zero2", {}),
    ],
)
def test_bytes_of_every_phase_are_the_closed_form(
    strategy: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Generating gathers the actor once a token, with hpZ between nodes once; scoring the frozen models once,
    with hpZ, and below stage 3, never again.  The plan has exactly the bytes sent.
    """
    rlhf = trial(strategy, **changes)
    record, policy = result(rlhf, tmp_path / "log"), rlhf.resolved_policy()
    assert policy is not None
    assert record.predicted is not None
    assert record.predicted.equal
    units = units_of(rlhf, record)
    actor, judges = ([unit for unit in units if unit.trainable is trained] for trained in (True, False))
    keeps, whole = bool(policy.secondary), policy.stage < 3
    evaluated: list[Event] = ["evaluate"]
    for rank in record.ranks:
        sent = Counter[str]()
        for row in rank.ledger or []:
            sent[_phase(row)] += row.bytes if row.link == "inter" else 0
        gather = _between(rlhf, actor, rank.rank, evaluated)
        step = passes(policy, norms=0 if rlhf.clip is None else 1)
        assert sent["generate"] == STEPS * (1 if keeps or whole else TOKENS) * gather > 0
        score = 0 if keeps or whole else STEPS * _between(rlhf, judges, rank.rank, evaluated)
        assert sent["score"] == score
        assert sent["train"] == STEPS * (_between(rlhf, actor, rank.rank, evaluated + step) - gather) > 0
    assert {check.unit for check in record.first_gradients} == {unit.name for unit in actor}
    assert all(0 < check.share <= 1 for check in record.first_gradients)
    (planned,) = forecast([rlhf], any_host())
    rows = [row for rank in record.ranks for row in rank.ledger or []]
    for link, bytes_planned in (("inter", planned.inter), ("intra", planned.intra)):
        assert bytes_planned == sum(row.bytes for row in rows if row.link == link) / STEPS
    _check_frozen(record, actor, judges, planned.memory or {})


def _check_frozen(
    record: Record, actor: list[UnitGeometry], judges: list[UnitGeometry], planned: dict[str, int]
) -> None:
    """The frozen models hold neither gradients nor optimizer's state, and send weights alone."""
    assert {name.split(".")[0] for name in (unit.name for unit in judges)} == {"root", "reference", "reward"}
    for rank in record.ranks:
        rows = [row for row in rank.ledger or [] if row.unit.endswith(FROZEN)]
        assert {(row.phase, row.purpose) for row in rows} <= {("evaluate", "weights")}
        engine, elements = rank.memory.engine, sum(unit.piece for unit in actor)
        assert engine["gradients"] == 4 * elements
        assert engine["optimizer"] == 8 * elements
        for part in ("masters", "frozen", "gradients", "optimizer", "secondary", "gathered"):
            assert engine.get(part, 0) == rank.memory.formula[part] == planned[part], part


def test_a_step_is_its_phases(tmp_path: Path) -> None:
    """A step's time holds those of its phases, each of which holds its waits."""
    for rank in result(trial("zero3"), tmp_path / "log").ranks:
        assert len(rank.steps) == STEPS + 1
        for step in rank.steps:
            assert step.generate
            assert step.score
            assert step.exposed is not None
            assert 0 <= (step.exposed_generate or 0) <= step.generate
            assert 0 <= (step.exposed_score or 0) <= step.score
            parts = step.generate + step.score + step.forward + step.backward + step.optimizer
            assert step.exposed <= parts <= step.total + 1e-4
