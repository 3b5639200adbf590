"""The phases of a step of workload ``rlhf`` before it trains: generate, and score, on one rank."""

from __future__ import annotations

import torch
from torch import nn

from harness.measure.step_clock import StepClock
from harness.measure.unsharded_loss import evaluating
from harness.suites.trial import Trial
from harness.workloads.generation import decode
from harness.workloads.models import shape_of
from harness.workloads.rank_batches import Given, RankBatches, batches_of
from harness.workloads.reinforcement import Experience, group_advantages, sampler, targets_of


def collect(
    trial: Trial,
    data: RankBatches,
    actor: nn.Module,
    judges: nn.Module,
    *,
    rank: int,
    index: int,
    clock: StepClock,
) -> Given:
    """What step ``index`` of a rank trains on; all ranks must call it, if the models are sharded.

    A prompt is the beginning of each of its first sequences of that step, and is continued as often as a
    group is large. The actor is passed once a token, the judges once, and ``clock`` times both phases.
    """
    generate, group = trial.generate, trial.rlhf.group
    drawn = [*batches_of(data, index)]
    read, _ = drawn[0]  # (B, sequence)
    prompts = read[: len(read) // group, : generate.prompt].repeat_interleave(group, 0)  # (B, prompt)
    layers, choose = shape_of(trial.model).layers, sampler(trial.seed, index, rank)
    with clock.part("generate"), evaluating(actor):
        written = torch.stack([*decode(actor, prompts, generate.tokens, layers, choose)], 1)
    sequences = torch.cat([prompts, written], 1)  # (B, sequence)
    targets = targets_of(sequences, generate.prompt)  # (B, sequence - 1)
    with clock.part("score"), torch.no_grad():
        reference, rewards = judges(sequences, targets)
    experience = Experience(targets, group_advantages(rewards, group), reference, trial.rlhf.kl)
    return Given((sequences[:, :-1], experience), drawn)
