"""Checks, while a trial runs, that it trains and times what it claims; codecs' kernels are checked before it.

These checks run outside the timed parts of a step.  Each rank notes facts, and
:func:`harness.records.record_checks.training_fault` judges those of all ranks:

- AdamW: the updates of a few master weights are computed again in float64;
- gradients: those that the optimizer gets equal those that the backward passes of the step left, and those of a
  rehearsal of the same step;
- losses: the loss on record is the mean of the losses that the passes of the step returned;
- clipping: this rank's part of a clipped gradient is not longer than the limit;
- batches: the hash of the batch that a rank read equals the hash of the batch that the rank before drew for it from
  the seed, and no batch is read twice;
- validation: the samples are drawn again by a second implementation;
- norms are equal on all ranks; timed steps fill the time that passed; a rank that sleeps reports waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from harness.measure.communication_error import measured_steps
from harness.measure.cpu_usage import stalled
from harness.records.record_checks import Checked
from harness.suites.peers import family_of
from harness.suites.trial import Trial
from harness.workloads.rank_batches import Batch, RankBatches
from impl import ops
from impl.codecs.codec import Codec, OwnCodec, Raw
from impl.codecs.reference import REFERENCE
from impl.codecs.rounding_noise import Noise

_TENSORS: Final = 16  # master tensors that are watched at most, spread over all of them
_ELEMENTS: Final = 32  # elements of each that are watched, spread evenly
_SETTINGS: Final = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2}  # AdamW's defaults
_ULPS: Final = 3 * 2.0**-24  # allowed error relative to a master, which AdamW rounds to fp32 twice
_RATE_ERROR: Final = 2e-5  # allowed error relative to the learning rate, from moments rounded to fp32
_CHANCES: Final = 2**24  # with more possible batches than this, two equal ones are no coincidence
_SAME: Final = 0.999  # smallest cosine of a step's and its rehearsal's gradients; only GPUs round differently
_PROBE: Final = 2048  # elements on which a kernel is checked, at least


class TrainingChecks:
    """The checks of one rank; :class:`harness.strategies.training_loop.TrainingLoop` calls them at each step."""

    def __init__(self, trial: Trial, data: RankBatches, rank: int, optimizer: torch.optim.Optimizer) -> None:
        self.checked = Checked()
        self.stalled = 0.0  # seconds of untimed work in which the thread waited for a CPU, so far
        self._data, self._world = data, trial.topology().world
        self._rank, self._sequences = rank, trial.accumulation * trial.tokens_per_rank // trial.sequence
        # Samples that this process should read in a step; the control "half_batch" reads half of them on purpose.
        halved = 2 if trial.control == "half_batch" else 1
        per_batch = trial.tokens_per_rank // trial.sequence // halved
        self._samples = trial.accumulation * per_batch * len(data.ranks)
        self._seen = set[str]()  # digests of the batches of all steps so far
        total = trial.warmup + trial.steps
        self._due = measured_steps(total) if trial.workload != "generate" else frozenset[int]()
        self._settings: dict[str, Any] = {**_SETTINGS, **trial.optimizer.arguments}
        self._schedule, self._clip = trial.schedule(), trial.clip
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._steps = 0
        self._rehearsed: dict[int, Tensor] = {}
        self._reduced: Tensor | None = None  # (n,) float64: watched gradients after the last backward pass
        self._masters: list[torch.nn.Parameter] = []  # those of which a few elements are watched
        # Only AdamW with its usual settings is computed again.  DeepSpeed has an implementation of its own.
        adamw = trial.optimizer.name == "AdamW" and self._settings.keys() == _SETTINGS.keys()
        if adamw and family_of(trial.strategy) != "deepspeed":
            plain = [p for p in self._parameters if type(p) is torch.nn.Parameter and p.numel()]
            plain = [p for p in plain if p.dtype is torch.float32]
            self._masters = plain[:: max(1, -(-len(plain) // _TENSORS))]
        self._value = _samples(self._masters)  # (n,) float64: the watched elements before the next step
        self._first = self._second = torch.zeros_like(self._value)  # AdamW's two moments of these elements
        if data.validation and _digest(data.validation) != _digest(self._held_out(trial)):
            self.checked.wrong = f"rank {rank} validates on other samples than those held out for it"

    def _held_out(self, trial: Trial) -> Iterator[Batch]:
        """Yield this rank's validation batches, drawn again by a second implementation of their order."""
        dataset, count = self._data.dataset, trial.tokens_per_rank // trial.sequence  # samples of a batch
        last = dataset.count(dataset.validation) - 1
        gaps = max(trial.validation_batches * self._world * count - 1, 1)
        for part in self._data.ranks:
            for batch in range(trial.validation_batches):
                places = [(batch * self._world + part) * count + place for place in range(count)]
                keys = [f"validation/{place}" for place in places]
                pair = dataset.at(dataset.validation, [place * last // gaps for place in places], keys)
                yield torch.tensor(pair[0]), torch.tensor(pair[1])

    def _note(self, wrong: str) -> None:
        """Keep this fault, unless an earlier one is kept already."""
        self.checked.wrong = self.checked.wrong or wrong

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the body's time out of what timed steps must fill."""
        begin, before = time.perf_counter(), stalled() or 0.0
        yield
        self.stalled += (stalled() or 0.0) - before
        self.checked.untimed += time.perf_counter() - begin

    def note_rehearsal(self, index: int) -> None:
        """Keep the present gradients, which come from a rehearsal of step ``index``."""
        if (gradient := self._gradients()) is not None:
            self._rehearsed[index] = gradient

    def note_reduced(self, loss: float) -> None:
        """Keep the present gradients, which backward passes have just left, and the mean ``loss`` of these passes."""
        with self.untimed():
            self._reduced = self._gradients()
            self.checked.losses.append(loss)

    def _gradients(self) -> Tensor | None:
        """Return the gradient of the watched elements, (n,) float64; None if a master has no gradient."""
        gradients = [master.grad for master in self._masters if master.grad is not None]
        return _samples(gradients) if gradients and len(gradients) == len(self._masters) else None

    def note_batches(self, step: int, batches: Iterable[Batch]) -> None:
        """Check that a step's batches are whole and were not read before.

        If the step is due, also note their digests, and those of the batches that the next rank should read.
        """
        with self.untimed():
            read, dataset = [*batches], self._data.dataset
            digest, found = _digest(read), sum(len(inputs) for inputs, _ in read)
            distinct = dataset.count(dataset.train) ** self._sequences > _CHANCES
            if distinct and digest in self._seen:
                self._note(
                    f"rank {self._rank} read in step {step} a batch that it had read in an earlier step"
                )
            self._seen.add(digest)
            if found != self._samples:
                self._note(f"rank {self._rank} read {found} samples in step {step}, not {self._samples}")
            if step in self._due:
                self.checked.batches[step] = digest
                neighbour = (self._rank + 1) % self._world
                self.checked.of_next_rank[step] = _digest(self._data.of_rank(step, neighbour))

    def replay(self, index: int, *, done: bool) -> None:
        """Compute step ``index`` of the optimizer again, from the present gradients, and compare.

        If the optimizer skipped the step for an overflow (not ``done``), masters must not have changed.
        """
        with self.untimed():
            self._steps += done
            gradient, after = self._gradients(), _samples(self._masters)
            reduced, self._reduced = self._reduced, None
            if done:
                self._check_same(index, gradient, reduced, "its backward passes left")
            rehearsed = self._rehearsed.pop(index, None)
            linked = self._check_same(
                index, gradient, rehearsed, "a rehearsal of the same step just before it"
            )
            self.checked.linked += linked
            if done and self._clip is not None and index in self._due:
                self._check_clipped(index, self._clip)
            if gradient is not None:
                self._compare(index, after, self._adamw(gradient, index) if done else self._value)
                self.checked.replayed += 1
            self._value = after

    def _check_same(self, index: int, gradient: Tensor | None, expected: Tensor | None, whose: str) -> bool:
        """Check that the optimizer has the ``expected`` gradients, up to a factor from clipping or loss scale.

        Returns:
            Whether there was anything to compare.
        """
        if expected is None or gradient is None or not bool(expected.any()):
            return False
        cosine = float(torch.nn.functional.cosine_similarity(expected, gradient, 0))
        if not cosine >= _SAME:
            self._note(
                f"in step {index} the optimizer of rank {self._rank} had other gradients than {whose}: "
                f"their cosine is {cosine:.3f}"
            )
        return True

    def _check_clipped(self, index: int, clip: float) -> None:
        """Check that the norm of this rank's part of the gradient is not above the limit for the whole."""
        gradients = [p.grad for p in self._parameters if type(p) is torch.nn.Parameter and p.grad is not None]
        norm = math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients))
        if not norm <= clip * 1.001:
            self._note(
                f"in step {index} rank {self._rank}'s part of the gradient has a norm of {norm:.6g}, although "
                f"the whole should be clipped to {clip:g}"
            )

    def _adamw(self, gradient: Tensor, index: int) -> Tensor:
        """Return the watched elements after a step of AdamW, (n,) float64 (Loshchilov and Hutter, algorithm 2)."""
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
        """Note the first watched element that is not what AdamW gives."""
        allowed = _ULPS * expected.abs() + _RATE_ERROR * abs(self._settings["lr"])
        wrong = ~((trained - expected).abs() <= allowed)  # negated, so that NaN is wrong too
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            self._note(
                f"after step {index} element {at} of those watched on rank {self._rank} is "
                f"{float(trained[at]):.9g}, but the trial's AdamW gives {float(expected[at]):.9g}: they differ by "
                f"more than {float(allowed[at]):.2g}"
            )


def _samples(tensors: Iterable[Tensor]) -> Tensor:
    """Return a few elements of each tensor, from first to last at equal distances, as (n,) float64 on the CPU."""
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
    """Return a sentence on the first codec whose kernels do not equal the reference bit by bit; else None."""
    for codec in dict.fromkeys(codecs):
        if isinstance(codec, Raw) or (isinstance(codec, OwnCodec) and not codec.published):
            continue  # casts are torch's, and a user's codec has the same code on every backend
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
            wrong = f"the {ops.backend_of(device)} kernels of {codec} do not equal the reference"
            off = float((elements - decoded.cpu()).abs().max())
            return f"{wrong}: of {numel} elements, decoded ones differ by up to {off:.3g}"
    return None
