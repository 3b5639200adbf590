"""Checks of training after its first step, outside of what is timed; of kernels, before it.

:func:`harness.records.record_checks.training_fault` judges what all ranks noted: a few masters are replayed
in float64 as AdamW; gradients are those of a rehearsal; batches are those that the seed gives this rank, by
hashes beside the next rank's draws, and validation is drawn again; norms are equal on all ranks; timed steps
fill the time that passed, and a rank that waits for messages sleeps.
"""

from __future__ import annotations

import hashlib
import itertools
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
_RATE_ERROR: Final = 2e-5  # of the learning rate: rounding of moments in fp32
_CHANCES: Final = 2**24  # possible draws from which on two are not equal by chance
_SAME: Final = 0.999  # cosine of the gradients of a step and of its rehearsal; 1 but for rounding on a GPU
_PROBE: Final = 2048  # elements of a kernel's check


class TrainingChecks:
    """The checks of one rank, which :class:`harness.strategies.training_loop.TrainingLoop` calls."""

    def __init__(self, trial: Trial, data: RankBatches, rank: int, optimizer: torch.optim.Optimizer) -> None:
        self.checked = Checked()
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
            plain = [p for p in plain if p.dtype is torch.float32]
            self._masters = plain[:: max(1, -(-len(plain) // _TENSORS))]
        self._value = _samples(self._masters)  # (n,) float64, before the next step
        self._first = self._second = torch.zeros_like(self._value)  # moments, as AdamW has them
        if data.validation and _digest(data.validation) != _digest(self._held_out(trial)):
            self.checked.wrong = f"rank {rank} validates on other samples than those held out for it"

    def _held_out(self, trial: Trial) -> Iterator[Batch]:
        """This rank's validation batches, drawn again by a second implementation of their order."""
        dataset, count = self._data.dataset, trial.tokens_per_rank // trial.sequence  # of a rank's samples
        last = dataset.count(dataset.validation) - 1
        gaps = max(trial.validation_batches * self._world * count - 1, 1)
        for part in self._data.ranks:
            for batch in range(trial.validation_batches):
                places = [(batch * self._world + part) * count + place for place in range(count)]
                keys = [f"validation/{place}" for place in places]
                pair = dataset.at(dataset.validation, [place * last // gaps for place in places], keys)
                yield torch.tensor(pair[0]), torch.tensor(pair[1])

    def _note(self, wrong: str) -> None:
        """Keep what went wrong first."""
        self.checked.wrong = self.checked.wrong or wrong

    def note_rehearsal(self, index: int) -> None:
        """Note the present gradients, those of a rehearsal of step ``index``."""
        if (gradient := self._gradients()) is not None:
            self._rehearsed[index] = gradient

    def _gradients(self) -> Tensor | None:
        """(n,) float64: of a few elements of each master; None where one has none."""
        gradients = [master.grad for master in self._masters if master.grad is not None]
        return _samples(gradients) if gradients and len(gradients) == len(self._masters) else None

    def note_batches(self, step: int, batches: Iterable[Batch]) -> None:
        """Note the batches of a step, if it is due."""
        if step in self._due:
            begin = time.perf_counter()
            digest, dataset = _digest(batches), self._data.dataset
            distinct = dataset.count(dataset.train) ** self._sequences > _CHANCES
            if distinct and digest in self.checked.batches.values():
                self._note(f"rank {self._rank} read in step {step} what it had read in a step before")
            self.checked.batches[step] = digest
            neighbour = (self._rank + 1) % self._world
            self.checked.of_next_rank[step] = _digest(self._data.of_rank(step, neighbour))
            self.checked.untimed += time.perf_counter() - begin

    def replay(self, index: int, *, done: bool) -> None:
        """Replay step ``index`` of the optimizer with the present gradients; skipped unless ``done``."""
        begin = time.perf_counter()
        self._steps += done
        gradient, after = self._gradients(), _samples(self._masters)
        self._check_rehearsed(index, gradient)
        if done and self._clip is not None and index in self._due:
            self._check_clipped(index, self._clip)
        if gradient is not None:
            self._compare(index, after, self._adamw(gradient, index) if done else self._value)
            self.checked.replayed += 1
        self._value = after
        self.checked.untimed += time.perf_counter() - begin

    def _check_rehearsed(self, index: int, gradient: Tensor | None) -> None:
        """The optimizer has the gradients of this step, but for a factor: clipping and loss scales."""
        expected = self._rehearsed.pop(index, None)
        if expected is None or gradient is None or not bool(expected.any()):
            return
        cosine = float(torch.nn.functional.cosine_similarity(expected, gradient, 0))
        self.checked.linked += 1
        if not cosine >= _SAME:
            self._note(
                f"in step {index} the optimizer of rank {self._rank} had other gradients than a rehearsal of "
                f"the step just before it: a cosine of {cosine:.3f}"
            )

    def _check_clipped(self, index: int, clip: float) -> None:
        """A rank's part of the gradient is no longer than the whole, which was clipped."""
        gradients = [p.grad for p in self._parameters if type(p) is torch.nn.Parameter and p.grad is not None]
        norm = math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients))
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

    def _compare(self, index: int, trained: Tensor, expected: Tensor) -> None:
        allowed = _ULPS * expected.abs() + _RATE_ERROR * abs(self._settings["lr"])
        wrong = ~((trained - expected).abs() <= allowed)  # NaN is wrong, too
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            self._note(
                f"after step {index} element {at} of those watched on rank {self._rank} is "
                f"{float(trained[at]):.9g}, by AdamW of the trial {float(expected[at]):.9g}: they differ by "
                f"more than {float(allowed[at]):.2g}"
            )


def _samples(tensors: Iterable[Tensor]) -> Tensor:
    """(n,) float64 on the CPU: elements of each from the first to the last, at equal distances."""
    samples = [torch.zeros(0, dtype=torch.float64)]
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, min(_ELEMENTS, flat.numel()), dtype=torch.float64)
        samples.append(flat[places.long().to(flat.device)].double().cpu())
    return torch.cat(samples)


def _digest(batches: Iterable[Batch]) -> str:
    digest = hashlib.sha256()
    for tensor in itertools.chain.from_iterable(batches):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def wrong_kernel(codecs: Iterable[Codec], device: torch.device) -> str | None:
    """A sentence on the first codec whose kernels do not write and read as the reference does; else None."""
    for codec in dict.fromkeys(codecs):
        if isinstance(codec, Raw) or (isinstance(codec, OwnCodec) and not codec.published):
            continue  # a user's codec runs alike on every backend
        numel = codec.grain * -(-_PROBE // codec.grain)
        x = ((torch.arange(numel) * 40503 % 65521).float() - 32760) / 7919  # (n,) in [-4.2, 4.2]
        noise = Noise((1, 2, 3, 4)) if codec.stochastic else None
        expected, elements = torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8), torch.empty(numel)
        frame, decoded = torch.zeros_like(expected, device=device), torch.empty(numel, device=device)
        REFERENCE.encode(codec, x, expected, noise=noise)
        REFERENCE.decode(codec, expected, elements)
        ops.encode(codec, x.to(device), frame, noise=noise)
        ops.decode(codec, frame, decoded)
        if not torch.equal(expected, frame.cpu()) or not torch.equal(elements, decoded.cpu()):
            wrong = f"the {ops.backend_of(device)} kernels of {codec} do not do what the reference does"
            off = float((elements - decoded.cpu()).abs().max())
            return f"{wrong}: {numel} elements differ by up to {off:.3g} after them"
    return None
