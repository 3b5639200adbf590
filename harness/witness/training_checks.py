"""Checks during a trial that its model is really trained as the trial says, and that its times are honest.

The checks run outside the timed parts of a step, and send no messages.  Each rank notes facts, and
:func:`harness.records.training_faults.training_fault` judges the notes of all ranks.  The following must hold:

- Optimizer: AdamW's steps, recomputed in float64 for a few elements, agree with the optimizer's steps
  (:mod:`harness.witness.optimizer_witness`).  If the optimizer is Muon, one of its steps, recomputed for one whole
  matrix, agrees with the optimizer's step too (:mod:`harness.witness.matrix_witness`).  The optimizers of all ranks
  together hold all trained elements.
- Gradients: the optimizer uses the gradients that the backward passes computed, apart from clipping and the loss scale.
  A rehearsal of a step, which runs its passes in advance, gives the same gradients as the step.
- Outer steps of DiLoCo (``policy.local_steps``): after an outer step all groups of ranks hold the same fp32 weights.
  They are the result of SGD with Nesterov momentum on the mean of the groups' progress
  (:mod:`harness.witness.outer_witness`).
- Losses: a step's recorded loss is the mean of the losses that its forward passes returned.
- Batches: the model reads the batches that the seed gives its rank.  No batch is read twice.  Validation reads the
  samples that are held out for it, and training reads none of them (:mod:`harness.witness.batch_witness`).
- Seconds: a second clock accounts for all time from the first timed step to the last
  (:mod:`harness.witness.witness_clock`).  If a rank's thread sleeps, the rank has recorded that it waited for messages.

The kernels of the codecs are checked before the trial (:func:`wrong_kernel`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from harness.records.training_faults import Checked, Norms
from harness.suites.peers import family_of
from harness.suites.trial import Trial
from harness.witness.batch_witness import BatchWitness, digest, same_inputs, shared_split
from harness.witness.check_costs import counted
from harness.witness.matrix_witness import MatrixWitness
from harness.witness.optimizer_witness import OptimizerWitness, local
from harness.witness.outer_witness import OuterWitness
from harness.workloads.rank_batches import Batch, RankBatches
from impl import ops
from impl.codecs.codec import Codec, OwnCodec, Raw
from impl.codecs.reference import REFERENCE
from impl.codecs.rounding_noise import Noise
from impl.zero import Zero

_PROBE: Final = 2048  # elements on which a kernel is checked, at least


class TrainingChecks:
    """Runs the checks of one rank; :class:`harness.strategies.training_loop.TrainingLoop` calls them at each step.

    Args:
        trial: The trial.
        data: The batches of this rank.
        rank: Number of this rank.
        optimizer: The optimizer of the training loop.
        read: List to which :func:`watch_inputs` appends the model's inputs in training mode; None if inputs are not
            watched.
        zero: This project's engine; None for other engines.  If its policy has local steps (DiLoCo), the outer steps
            are checked too.
    """

    def __init__(
        self,
        trial: Trial,
        data: RankBatches,
        rank: int,
        optimizer: torch.optim.Optimizer,
        read: list[Tensor] | None = None,
        *,
        zero: Zero | None = None,
    ) -> None:
        self.checked = Checked(warmup=trial.warmup, timed=trial.steps, clip=trial.clip)
        self._trial, self._data, self._rank = trial, data, rank
        self._read, costs = read, self.checked.costs
        with counted(costs, "optimizer"):
            self._optimizer = OptimizerWitness(trial, rank, optimizer)
        self.matrix: MatrixWitness | None = None  # watches one matrix, if Muon steps a sharded model
        # If set, called with the number of each step when its backward passes have ended.  In one step, chosen at
        # random, it compares the step's gradients with a single process.
        self.compare: Callable[[int], None] | None = None
        self._batches = BatchWitness(trial, data.dataset)
        self._outer = None
        if zero is not None and zero.policy.local_steps is not None and not trial.own_strategy:
            self._outer = OuterWitness(zero, optimizer)
            self.checked.outer, self.checked.outer_start = self._outer.rules, self._outer.start
            self.checked.outer_notes = self._outer.notes
        self.checked.distinct = self._batches.distinct
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # DeepSpeed shows neither its gradients nor all of its masters.
        self._shown = family_of(trial.strategy) != "deepspeed" and trial.workload != "generate"
        if self._shown:
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            self.checked.elements = sum(local(parameter).numel() for parameter in trained)
        # Norm of the gradient after the last backward pass, and the loss scale in it.
        self._reduced = self._scale = 0.0
        with counted(costs, "validation samples"):
            if data.validation and digest(data.validation) != digest(self._batches.held_out(data.ranks)):
                self._note(f"rank {rank} validates on other samples than those held out for it")
            if (shared := shared_split(data.dataset)) is not None:
                self._note(f"on rank {rank} {shared}")

    def _note(self, wrong: str | None) -> None:
        """Keep the sentence ``wrong`` if no earlier sentence was kept; do nothing if ``wrong`` is None."""
        self.checked.wrong = self.checked.wrong or wrong

    def note_rehearsal(self, index: int) -> None:
        """Keep the gradients of a rehearsal of step ``index``; :meth:`replay` compares them with the step's gradients.

        A rehearsal runs the forward and backward passes of the step in advance, and changes nothing that training
        depends on.  Call this method right after the rehearsal, while its gradients are in the parameters.
        """
        self._optimizer.note_rehearsal(index)

    def note_reduced(self, index: int, loss: float, scale: float) -> None:
        """Note the loss and the gradients of step ``index``; call this when its backward passes have ended.

        The method does the following:

        1. If :attr:`compare` is set, it calls this function.  In one of the steps, the function compares the gradients
           with those that a single process computes.
        2. It checks, for some of the weights, that nothing has changed them since the optimizer's previous step.
        3. It keeps the gradients, which :meth:`replay` compares with those that the optimizer has used.
        4. It keeps the norm of the gradients, which :meth:`replay` notes.

        Args:
            index: Number of the step.
            loss: Mean of the losses that the step's forward passes returned.
            scale: The loss scale that the gradients are multiplied by.
        """
        if self.compare is not None:
            self.compare(index)
        self.checked.losses.append(loss)
        with counted(self.checked.costs, "optimizer"):
            self._note(self._optimizer.before(index))
            self._note(None if self.matrix is None else self.matrix.before(index))
        self._reduced, self._scale = self._norm(), scale

    def replay(self, index: int, *, done: bool) -> None:
        """Recompute the optimizer's step ``index``, which has just ended, for a few weights, and note any difference.

        If the optimizer has taken the step, also note two norms of the gradients: as the backward passes left them, and
        as the optimizer has used them.  With local steps (DiLoCo), also record a few weights after an outer step.
        ``done`` is False if the optimizer has skipped the step because of an overflow.
        """
        if done and self._shown:
            self.checked.norms[index] = Norms(self._reduced, self._norm(), self._scale)
        with counted(self.checked.costs, "optimizer"):
            self._note(self._optimizer.after(index, done=done))
            self._note(None if self.matrix is None else self.matrix.after(index, done=done))
            if self._outer is not None:
                self._outer.after(index, done=done)
        self.checked.replayed, self.checked.linked = self._optimizer.replayed, self._optimizer.linked

    def note_batches(self, step: int, drawn: Iterable[Batch], given: Iterable[Batch]) -> None:
        """Check that the model read the batches of a step, and note digests of this and of the next rank's batches.

        The first digest is made from ``drawn``, which this rank has read.  The second digest is made from the batches
        that the next rank must read, and that this method recomputes from the seed.  After the trial,
        :func:`~harness.records.training_faults.training_fault` checks that this rank's second digest equals the next
        rank's first digest.  Each rank thus checks what another rank has read.  If one process reads the batches of all
        ranks, both digests are made from the batches of all ranks.

        Args:
            step: Number of the step.
            drawn: The batches that the data set gave this rank.
            given: The batches that the training loop passed to the model.  They equal ``drawn``, except in workload
                ``rlhf``, which trains on generated continuations of ``drawn``.
        """
        found, given = [*drawn], [*given]
        samples = self._batches.samples * len(self._data.ranks)
        if (count := sum(len(inputs) for inputs, _ in found)) != samples:
            self._note(f"rank {self._rank} read {count} samples in step {step}, not {samples}")
        if self._read is not None:
            if not same_inputs(self._read, given):
                count = sum(len(inputs) for inputs in self._read)
                self._note(
                    f"in step {step} the model on rank {self._rank} read {count} samples in {len(self._read)} passes "
                    f"that are not the {len(given)} batches of the step"
                )
            self._read.clear()
        self.checked.batches[step] = digest(found)
        one_process = len(self._data.ranks) > 1 or self._trial.strategy == "single"
        following = (self._rank + 1) % self._trial.topology().world
        ranks = self._data.ranks if one_process else (following,)
        self.checked.of_next_rank[step] = digest(self._batches.batches(step, ranks))

    def _norm(self) -> float:
        """Return the 2-norm of all gradients that this rank's optimizer holds now.

        It is 0 if there are no gradients, or if the engine does not show them (DeepSpeed).
        """
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None] if self._shown else []
        if not gradients:
            return 0.0
        with counted(self.checked.costs, "norms"):
            return math.sqrt(math.fsum(float(norm) ** 2 for norm in torch._foreach_norm(gradients)))  # noqa: SLF001


def watch_inputs(model: nn.Module) -> list[Tensor]:
    """Return a list to which every forward pass of ``model`` in training mode appends the model's first input."""
    read: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training:
            read.append(inputs[0])

    model.register_forward_pre_hook(note)
    return read


def wrong_kernel(codecs: Iterable[Codec], device: torch.device) -> str | None:
    """Return a sentence on the first codec whose kernels on ``device`` are wrong; None if there is none.

    Kernels are right if they encode and decode exactly as the reference implementation in PyTorch does
    (:data:`impl.codecs.reference.REFERENCE`).  Two kinds of codecs are left out: casts, since PyTorch does them, and
    users' own codecs, since they have the same code on every device.
    """
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
            return f"{wrong}: the largest difference of {numel} decoded elements is {off:.3g}"
    return None
