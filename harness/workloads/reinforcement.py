"""Workload ``rlhf``: models and loss of group-relative policy optimisation (GRPO, arXiv 2402.03300).

In each step the actor continues prompts, a group of continuations for each prompt.  A frozen reward model scores
them and a frozen reference model gives their log probabilities; then the actor takes one optimizer step.
:func:`harness.strategies.training_loop.collect` runs these phases.
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
    """The targets, advantages and reference probabilities from which an actor learns, besides the tokens.

    This is not a dataclass, because engines cast the tensors in dataclasses to 16 bits.

    Args:
        targets: (B, T) int64 next tokens, ``NO_TARGET`` inside prompts.
        advantages: (B,) fp32, of each sequence.
        reference: (B, T) fp32 log probabilities of the targets, from the reference model.
        kl: Weight of the divergence from the reference model.
    """

    __slots__ = ("advantages", "kl", "reference", "targets")

    def __init__(self, targets: Tensor, advantages: Tensor, reference: Tensor, kl: float) -> None:
        self.targets, self.advantages, self.reference, self.kl = targets, advantages, reference, kl


class Actor(GPT):
    """A GPT whose loss over an :class:`Experience` is GRPO's."""

    def forward(
        self, tokens: Tensor, targets: Tensor | Experience | None, past: Sequence[KeysAndValues] | None = None
    ) -> Tensor:
        """Return the () loss of (B, T) tokens; for targets that are tensors or None, see :meth:`GPT.forward`."""
        if isinstance(targets, Experience):
            return grpo_loss(self.log_probabilities(tokens, targets.targets), targets)
        return super().forward(tokens, targets, past)


class Judges(nn.Module):
    """The two frozen models, reference and reward, as one module that runs them one after the other."""

    def __init__(self, reference: GPT, reward: GPT) -> None:
        super().__init__()
        self.reference, self.reward = reference, reward
        self.requires_grad_(requires_grad=False)

    def forward(self, sequences: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, T) log probabilities of the targets, and (B,) rewards, of (B, T + 1) tokens."""
        logs = self.reference.log_probabilities(sequences[:, :-1], targets)
        return logs, self.reward(sequences, None)[:, 0].float()


def actor_of(trial: Trial) -> Actor:
    """Build the model that is trained; raises what :func:`harness.workloads.models.build` raises."""
    actor = Actor(shape_of(trial.model), trial.sequence)  # type: ignore[arg-type]  # suites are checked
    if trial.activation_checkpointing:
        checkpoint_activations(actor)
    return actor


def judges_of(trial: Trial, actor: nn.Module) -> Judges:
    """Build the frozen models: the reference is a copy of the actor, which must not have been trained yet.

    The reward model is a GPT of the same shape with random weights, whose head has one output.
    """
    assert isinstance(actor, GPT)  # noqa: S101  # suites are checked
    shape = shape_of(trial.model)
    reward = GPT(shape, trial.sequence)  # type: ignore[arg-type]
    reward.head = nn.Linear(shape.width, 1, bias=False)
    return Judges(copy.deepcopy(actor), reward)


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """Return (B,) fp32 advantages of (B,) rewards; each ``group`` adjacent rewards form a group.

    An advantage is the reward minus the group's mean, divided by the group's standard deviation; it is 0 in a
    group of equal rewards.
    """
    # In fp64 the mean of equal fp32 numbers is exactly that number.
    grouped = rewards.double().view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, correction=0, keepdim=True) + _LEAST_SPREAD)).flatten().float()


def grpo_loss(logs: Tensor, experience: Experience) -> Tensor:
    """Return GRPO's () loss: the mean over generated tokens of ``-advantage * log p + kl * (r - log r - 1)``.

    ``p`` is the actor's probability of a token, and ``logs`` (B, T) its logarithm; ``r`` is the reference's
    probability divided by ``p``.  With one update a step, the gradient of ``log p`` is that of GRPO's ratio.
    """
    written = experience.targets != NO_TARGET  # (B, T)
    log_ratio = (experience.reference - logs)[written]  # (n,), log r
    gain = (experience.advantages[:, None] * logs)[written]
    return (experience.kl * (log_ratio.exp() - log_ratio - 1) - gain).mean()


def targets_of(sequences: Tensor, prompt: int) -> Tensor:
    """Return the (B, T) int64 next tokens of (B, T + 1) sequences, ``NO_TARGET`` inside their prompts."""
    targets = sequences[:, 1:].clone()
    targets[:, : prompt - 1] = NO_TARGET
    return targets


def sampler(seed: int, step: int, rank: int) -> Callable[[Tensor], Tensor]:
    """Return a function that draws (B,) int64 tokens from the softmax of (B, vocab) logits.

    The draws depend on seed, step and rank only.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def draw(logits: Tensor) -> Tensor:
        shares = logits.float().softmax(-1).cpu()  # (B, vocab)
        return torch.multinomial(shares, 1, generator=random)[:, 0].to(logits.device)

    return draw
