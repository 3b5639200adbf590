"""Defines models and loss of workload ``rlhf``: group-relative policy optimisation (GRPO, arXiv 2402.03300).

In each step the actor, which is the model that is trained, writes a group of continuations of each prompt.  A frozen
reward model scores the continuations, and a frozen reference model gives their log probabilities.  Then the actor takes
one optimizer step.  :func:`harness.strategies.training_loop.collect` generates and scores the continuations.
"""

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

_LEAST_SPREAD = 1e-4  # added to the standard deviation of a group's rewards, which may be 0


class Experience:
    """Holds what the actor's loss needs in addition to the tokens: targets, advantages and log probabilities.

    This is not a dataclass, because engines cast the tensors in dataclasses to 16 bits.

    Args:
        targets: The token that follows each token, (B, T) int64; ``NO_TARGET`` inside prompts (:func:`targets_of`).
        advantages: The advantage of each sequence, (B,) fp32 (:func:`group_advantages`).
        reference: Log probabilities of the targets under the reference model, (B, T) fp32.
        kl: Weight of the divergence from the reference model.
    """

    __slots__ = ("advantages", "kl", "reference", "targets")

    def __init__(self, targets: Tensor, advantages: Tensor, reference: Tensor, kl: float) -> None:
        self.targets, self.advantages, self.reference, self.kl = targets, advantages, reference, kl


class Actor(GPT):
    """The GPT that is trained.  If its targets are an :class:`Experience`, its loss is GRPO's loss."""

    def forward(
        self, tokens: Tensor, targets: Tensor | Experience | None, past: Sequence[KeysAndValues] | None = None
    ) -> Tensor:
        """Return GRPO's loss of (B, T) tokens, a scalar, if ``targets`` is an :class:`Experience`.

        With a tensor or None as ``targets``, return the result of :meth:`GPT.forward`.
        """
        if isinstance(targets, Experience):
            return grpo_loss(self.log_probabilities(tokens, targets.targets), targets)
        return super().forward(tokens, targets, past)


class Judges(nn.Module):
    """The two frozen models, the reference model and the reward model, as one module that runs both."""

    def __init__(self, reference: GPT, reward: GPT) -> None:
        super().__init__()
        self.reference, self.reward = reference, reward
        self.requires_grad_(requires_grad=False)

    def forward(self, sequences: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Score sequences with both models.

        Args:
            sequences: (B, T + 1) int64 tokens, prompts included.
            targets: (B, T) int64 targets (:func:`targets_of`).

        Returns:
            Log probabilities of the targets under the reference model, (B, T) fp32, and the reward of each sequence,
            (B,) fp32.
        """
        logs = self.reference.log_probabilities(sequences[:, :-1], targets)
        return logs, self.reward(sequences, None)[:, 0].float()


def actor_of(trial: Trial) -> Actor:
    """Build the actor, which is the model that is trained.

    Raises:
        Refusal: if there is no preset of the trial's ``model.name``, or if its arguments are invalid.
    """
    actor = Actor(shape_of(trial.model), trial.sequence)  # type: ignore[arg-type]  # suites are checked
    if trial.activation_checkpointing:
        checkpoint_activations(actor)
    return actor


def judges_of(trial: Trial, actor: nn.Module) -> Judges:
    """Build the frozen models: the reference model and the reward model.

    The reference model is a copy of the actor, so the actor must not have been trained yet.  The reward model is a GPT
    of the same shape with random weights; its head has one output.
    """
    assert isinstance(actor, GPT)  # noqa: S101  # suites are checked
    shape = shape_of(trial.model)
    reward = GPT(shape, trial.sequence)  # type: ignore[arg-type]
    reward.head = nn.Linear(shape.width, 1, bias=False)
    return Judges(copy.deepcopy(actor), reward)


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """Return the advantage of each sequence, (B,) fp32, from the rewards (B,).

    With ``group`` = 4, the first four rewards form a group, the next four form another group, and so on.  An advantage
    is ``(reward - mean) / (deviation + 1e-4)``, with mean and standard deviation of the group's rewards.  It is 0 if
    all rewards of the group are equal.
    """
    # In fp64 the mean of equal fp32 numbers is exactly that number.
    grouped = rewards.double().view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, correction=0, keepdim=True) + _LEAST_SPREAD)).flatten().float()


def grpo_loss(logs: Tensor, experience: Experience) -> Tensor:
    """Return GRPO's loss, a scalar: the mean of ``-advantage * log p + kl * (r - log r - 1)`` over generated tokens.

    ``p`` is the probability that the actor gives to a token, and ``logs`` (B, T) has its logarithm.  ``r`` is the
    probability that the reference model gives to the token, divided by ``p``.

    GRPO's published formula has the ratio of the actor's new to its old probability where this formula has ``log p``.
    If the actor is updated once in a step, as here, both formulas have the same gradient.
    """
    written = experience.targets != NO_TARGET  # (B, T)
    log_ratio = (experience.reference - logs)[written]  # (n,), log r
    gain = (experience.advantages[:, None] * logs)[written]
    return (experience.kl * (log_ratio.exp() - log_ratio - 1) - gain).mean()


def targets_of(sequences: Tensor, prompt: int) -> Tensor:
    """Return the targets (B, T) int64 of the first T tokens of ``sequences`` (B, T + 1).

    The target of a token is the next token of its sequence.  The first ``prompt`` tokens of a sequence are the prompt.
    If the next token belongs to the prompt, the target is ``NO_TARGET``, so that the loss covers only generated tokens.
    """
    targets = sequences[:, 1:].clone()
    targets[:, : prompt - 1] = NO_TARGET
    return targets


def sampler(seed: int, step: int, rank: int) -> Callable[[Tensor], Tensor]:
    """Return a function that samples (B,) int64 tokens from the softmax of (B, vocab) logits.

    The random numbers of the function depend only on seed, step and rank.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def draw(logits: Tensor) -> Tensor:
        shares = logits.float().softmax(-1).cpu()  # (B, vocab)
        return torch.multinomial(shares, 1, generator=random)[:, 0].to(logits.device)

    return draw
