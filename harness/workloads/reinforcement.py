"""Workload ``rlhf``: group-relative policy gradients (GRPO, arXiv 2402.03300), one update a step."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from harness.suites.trial import Trial
from harness.workloads.masked_text import NO_TARGET
from harness.workloads.models import GPT, KeysAndValues, checkpoint_activations
from harness.workloads.preset_parameters import shape_of

_LEAST_SPREAD = 1e-4  # added to the deviation of rewards, which is 0 for equal ones


class Experience:
    """What an actor learns from, beside the tokens: no dataclass, so that nobody casts it to 16 bits.

    ``reference`` has the fp32 log probabilities of (B, T) int64 ``targets``, ``NO_TARGET`` inside prompts;
    ``advantages`` are (B,) fp32, and ``kl`` weighs the divergence from the reference.
    """

    __slots__ = ("advantages", "kl", "reference", "targets")

    def __init__(self, targets: Tensor, advantages: Tensor, reference: Tensor, kl: float) -> None:
        self.targets, self.advantages, self.reference, self.kl = targets, advantages, reference, kl


class Actor(GPT):
    """A GPT whose loss over an :class:`Experience` is GRPO's."""

    def forward(
        self, tokens: Tensor, targets: Tensor | Experience | None, past: Sequence[KeysAndValues] | None = None
    ) -> Tensor:
        """() loss of (B, T) tokens; as of :class:`GPT` for targets that are no :class:`Experience`."""
        if isinstance(targets, Experience):
            return grpo_loss(self.log_probabilities(tokens, targets.targets), targets)
        return super().forward(tokens, targets, past)


class Judges(nn.Module):
    """The frozen models, which read the same sequences one after the other."""

    def __init__(self, reference: GPT, reward: GPT) -> None:
        super().__init__()
        self.reference, self.reward = reference, reward
        self.requires_grad_(requires_grad=False)

    def forward(self, sequences: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) log probabilities of (B, T) targets, and (B,) rewards, of (B, T + 1) tokens."""
        logs = self.reference.log_probabilities(sequences[:, :-1], targets)
        return logs, self.reward(sequences, None)[:, 0].float()


def actor_of(trial: Trial) -> Actor:
    """The model that is trained; raises as :func:`harness.workloads.models.build`."""
    actor = Actor(shape_of(trial.model), trial.sequence)  # type: ignore[arg-type]  # suites are checked
    if trial.activation_checkpointing:
        checkpoint_activations(actor)
    return actor


def judges_of(trial: Trial, actor: nn.Module) -> Judges:
    """The frozen models of an actor that has not learnt yet; the reward model's head has one output."""
    assert isinstance(actor, GPT)  # noqa: S101  # suites are checked
    shape = shape_of(trial.model)
    reward = GPT(shape, trial.sequence)  # type: ignore[arg-type]
    reward.head = nn.Linear(shape.width, 1, bias=False)
    return Judges(copy.deepcopy(actor), reward)


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """(B,) fp32: rewards (B,) less their group's mean, over its standard deviation; 0 where all are equal."""
    grouped = rewards.double().view(-1, group)  # fp64, in which the mean of equal fp32 is that number
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, correction=0, keepdim=True) + _LEAST_SPREAD)).flatten().float()


def grpo_loss(logs: Tensor, experience: Experience) -> Tensor:
    """() mean over written tokens of ``-advantage * log p + kl * (r - log r - 1)``, of ``logs`` (B, T) of p.

    ``r`` is the reference's probability over ``p``; the first term's gradient is that of GRPO's ratio.
    """
    written = experience.targets != NO_TARGET  # (B, T)
    log_ratio = (experience.reference - logs)[written]  # (n,), log r
    gain = (experience.advantages[:, None] * logs)[written]
    return (experience.kl * (log_ratio.exp() - log_ratio - 1) - gain).mean()


def targets_of(sequences: Tensor, prompt: int) -> Tensor:
    """(B, T) int64 successors of the first T of (B, T + 1) tokens; ``NO_TARGET`` inside prompts."""
    targets = sequences[:, 1:].clone()
    targets[:, : prompt - 1] = NO_TARGET
    return targets


def sampler(seed: int, step: int, rank: int) -> Callable[[Tensor], Tensor]:
    """A seeded function that draws (B,) int64 tokens from the softmax of (B, vocab) logits."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def draw(logits: Tensor) -> Tensor:
        shares = logits.float().softmax(-1).cpu()  # (B, vocab)
        return torch.multinomial(shares, 1, generator=random)[:, 0].to(logits.device)

    return draw
