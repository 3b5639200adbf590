"""Checks of training after its first step, outside of what is timed; of kernels, before it.

:func:`harness.records.record_checks.training_fault` judges what all ranks saw: a few masters are replayed in
float64 as AdamW; gradients are those of a rehearsal; batches are those that the seed gives this rank, by
hashes beside the next rank's draws, and validation is drawn again; norms are equal on all ranks; timed steps
fill the time that passed, and a rank that waits for messages sleeps.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from harness.measure.communication_error import measured_steps
from harness.records.record_checks import Checked
from harness.suites.peers import family_of
from harness.suites.trial import Trial
from harness.workloads.rank_batches import Batch, RankBatches
from impl import ops
from impl.codecs.codec import Codec, OwnCodec, Raw
from impl.codecs.reference import REFERENCE
from impl.codecs.rounding_noise import Noise

_TENSORS: Final = 16  # of an optimizer, at most, from its first to its last
_ELEMENTS: Final = 32  # of each, from its first to its last
_SETTINGS: Final = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2}  # AdamW's own
_ULPS: Final = 3 * 2.0**-24  # of a master: fp32 rounds it in each of two operations
_OF_RATE: Final = 2e-5  # of the learning rate: rounding of moments in fp32
_CHANCES: Final = 2**24  # draws among so many are not twice the same
_SAME: Final = 0.999  # cosine of the gradients of a step and of its rehearsal; 1 but for rounding on a GPU
_PROBE: Final = 2048  # elements of a kernel's check


class TrainingChecks:
    """The checks of one rank, which :class:`harness.strategies.training_loop.TrainingLoop` calls."""

    def __init__(self, trial: Trial, data: RankBatches, rank: int, optimizer: torch.optim.Optimizer) -> None:
        self.found = Checked()
        self._data, self._world = data, trial.topology().world
        self._rank, self._sequences = rank, trial.accumulation * trial.tokens_per_rank // trial.sequence
        total = trial.warmup + trial.steps
        self._due = measured_steps(total) if trial.workload != "generate" else frozenset[int]()
        self._settings: dict[str, Any] = {**_SETTINGS, **trial.optimizer.arguments}
        self._schedule, self._clip = trial.schedule(), trial.clip
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._steps = 0
        self._rehearsed: dict[int, Tensor] = {}
        self._masters: list[torch.nn.Parameter] = []  # of which a few elements are replayed
        # Of another optimizer, or one with further settings, nothing is replayed; DeepSpeed has its own.
        adamw = trial.optimizer.name == "AdamW" and self._settings.keys() == _SETTINGS.keys()
        if adamw and family_of(trial.strategy) != "deepspeed":
            plain = [p for p in self._parameters if type(p) is torch.nn.Parameter and p.numel()]
            full = [p for p in plain if p.dtype is torch.float32]
            self._masters = full[:: max(1, -(-len(full) // _TENSORS))]
        self._value = _samples(self._masters)  # (n,) float64, before the next step
        self._first = self._second = torch.zeros_like(self._value)  # moments, as AdamW has them
        if data.validation and _digest(data.validation) != _digest(self._held_out(trial)):
            self.found.wrong = f"rank {rank} validates on other samples than those held out for it"

    def _held_out(self, trial: Trial) -> Iterator[Batch]:
        """This rank's validation batches, drawn again by a second implementation of their order."""
        drawn, ours = self._data.dataset, trial.tokens_per_rank // trial.sequence
        last = drawn.count(drawn.validation) - 1
        gaps = max(trial.validation_batches * self._world * ours - 1, 1)
        for part in self._data.ranks:
            for batch in range(trial.validation_batches):
                places = [(batch * self._world + part) * ours + place for place in range(ours)]
                keys = [f"validation/{place}" for place in places]
                read, answer = drawn.at(drawn.validation, [place * last // gaps for place in places], keys)
                yield torch.tensor(read), torch.tensor(answer)

    def _note(self, wrong: str) -> None:
        """Keep what went wrong first."""
        self.found.wrong = self.found.wrong or wrong

    def rehearsed(self, index: int) -> None:
        """Note the gradients of a rehearsal of step ``index``, which are there."""
        if (found := self._gradients()) is not None:
            self._rehearsed[index] = found

    def _gradients(self) -> Tensor | None:
        """(n,) float64: of a few elements of each master; None where one has none."""
        found = [gradient for master in self._masters if (gradient := master.grad) is not None]
        return _samples(found) if found and len(found) == len(self._masters) else None

    def read(self, step: int, batches: Iterable[Batch]) -> None:
        """Note what the model read in a step that is due."""
        if step in self._due:
            begin = time.perf_counter()
            digest, draws = _digest(batches), self._data.dataset
            many = draws.count(draws.train) ** self._sequences > _CHANCES
            if many and digest in self.found.batches.values():
                self._note(f"rank {self._rank} read in step {step} what it had read in a step before")
            self.found.batches[step] = digest
            after = self._data.of_rank(step, (self._rank + 1) % self._world)
            self.found.of_next_rank[step] = _digest(after)
            self.found.untimed += time.perf_counter() - begin

    def stepped(self, index: int, *, done: bool) -> None:
        """Replay step ``index`` of the optimizer, whose gradients are there; not ``done``, it was skipped."""
        begin = time.perf_counter()
        self._steps += done
        gradient, after = self._gradients(), _samples(self._masters)
        self._check_rehearsed(index, gradient)
        if done and self._clip is not None and index in self._due:
            self._check_clipped(index, self._clip)
        if gradient is not None:
            self._compare(index, after, self._adamw(gradient, index) if done else self._value)
            self.found.replayed += 1
        self._value = after
        self.found.untimed += time.perf_counter() - begin

    def _check_rehearsed(self, index: int, found: Tensor | None) -> None:
        """The optimizer has the gradients of this step, but for a factor: clipping and loss scales."""
        expected = self._rehearsed.pop(index, None)
        if expected is None or found is None or not bool(expected.any()):
            return
        cosine = float(torch.nn.functional.cosine_similarity(expected, found, 0))
        self.found.linked += 1
        if not cosine >= _SAME:
            self._note(
                f"in step {index} the optimizer of rank {self._rank} had other gradients than a rehearsal of "
                f"the step just before it: a cosine of {cosine:.3f}"
            )

    def _check_clipped(self, index: int, clip: float) -> None:
        """A rank's part of the gradient is no longer than the whole, which was clipped."""
        gradients = [p.grad for p in self._parameters if type(p) is torch.nn.Parameter and p.grad is not None]
        norm = math.sqrt(math.fsum(float(one.double().square().sum()) for one in gradients))
        if not norm <= clip * 1.001:
            self._note(
                f"in step {index} rank {self._rank}'s part of the gradient has a norm of {norm:.6g}, and was "
                f"to be clipped to {clip:g}"
            )

    def _adamw(self, gradient: Tensor, index: int) -> Tensor:
        """(n,) float64: decoupled weight decay, then Adam (Loshchilov and Hutter, algorithm 2)."""
        settings = self._settings
        beta1, beta2 = settings["betas"]
        rate = settings["lr"] * (1.0 if self._schedule is None else self._schedule.factor(index))
        self._first = beta1 * self._first + (1 - beta1) * gradient
        self._second = beta2 * self._second + (1 - beta2) * gradient**2
        mean = self._first / (1 - beta1**self._steps)
        spread = (self._second / (1 - beta2**self._steps)).sqrt() + settings["eps"]
        after: Tensor = self._value * (1 - rate * settings["weight_decay"]) - rate * mean / spread
        return after

    def _compare(self, index: int, found: Tensor, expected: Tensor) -> None:
        allowed = _ULPS * expected.abs() + _OF_RATE * abs(self._settings["lr"])
        wrong = ~((found - expected).abs() <= allowed)  # NaN is wrong, too
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            self._note(
                f"after step {index} element {at} of those watched on rank {self._rank} is "
                f"{float(found[at]):.9g}, by AdamW of the trial {float(expected[at]):.9g}: they differ by "
                f"more than {float(allowed[at]):.2g}"
            )


def _samples(tensors: Iterable[Tensor]) -> Tensor:
    """(n,) float64 on the CPU: elements of each from the first to the last, at equal distances."""
    found = [torch.zeros(0, dtype=torch.float64)]
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, min(_ELEMENTS, flat.numel()), dtype=torch.float64)
        found.append(flat[places.long().to(flat.device)].double().cpu())
    return torch.cat(found)


def _digest(batches: Iterable[Batch]) -> str:
    found = hashlib.sha256()
    for read, answer in batches:
        for tensor in (read, answer):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def wrong_kernel(codecs: Iterable[Codec], device: torch.device) -> str | None:
    """The first codec whose kernels do not write and read what the reference does, in words; else None."""
    for codec in dict.fromkeys(codecs):
        if isinstance(codec, Raw) or (isinstance(codec, OwnCodec) and not codec.published):
            continue  # a user's own runs alike on every backend
        numel = codec.grain * -(-_PROBE // codec.grain)
        x = ((torch.arange(numel) * 40503 % 65521).float() - 32760) / 7919  # (n,) in [-4.2, 4.2]
        noise = Noise((1, 2, 3, 4)) if codec.stochastic else None
        frames = [torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8) for _ in range(2)]
        elements = [torch.empty(numel) for _ in range(2)]
        REFERENCE.encode(codec, x, frames[0], noise=noise)
        REFERENCE.decode(codec, frames[0], elements[0])
        ours, back = frames[1].to(device), elements[1].to(device)
        ops.encode(codec, x.to(device), ours, noise=noise)
        ops.decode(codec, ours, back)
        if not torch.equal(frames[0], ours.cpu()) or not torch.equal(elements[0], back.cpu()):
            off = float((elements[0] - back.cpu()).abs().max())
            told = f"the {ops.backend_of(device)} kernels of {codec} do not do what the reference does"
            return f"{told}: {numel} elements differ by up to {off:.3g} after them"
    return None
