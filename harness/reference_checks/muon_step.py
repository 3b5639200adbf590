"""Recomputes one step of Muon for one whole matrix, as a check of the engine.

Under ZeRO-3 each rank has only a part of a matrix.  In one step of the trial, a
:class:`~harness.witness.matrix_witness.MatrixWitness` notes each rank's part of the matrix, of its momentum and of its
gradient.  After this step, all ranks gather these parts, and compute the step again from the whole values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import _muon as torch_muon

from harness.reference_checks.single_process import checked_step
from harness.strategies.optimizers import muon_arguments, set_rates
from harness.suites.trial import Trial
from harness.witness.matrix_witness import MatrixWitness
from harness.workloads.dataset import draw
from impl.codecs import reference
from impl.codecs.codec import Codec
from impl.comm.wire import Observer
from impl.engine.muon import Muon
from impl.unit.whole_values import WholeValues
from impl.zero import Zero

# Two parts of the allowed difference between two computations of a Muon step.  The first is a share of each weight,
# which is rounded three times.  The second is a share of the learning rate: sums of bf16 in another order may change an
# element of the update by a few units of 2^-8.
_MUON_ULPS: Final = 3 * 2.0**-24
_MUON_ERROR: Final = 2.0**-5


def watch(trial: Trial, zero: Zero, optimizer: torch.optim.Optimizer) -> MatrixWitness | None:
    """Return an observer of one matrix that Muon updates; :func:`compare_step` uses its notes to check one step.

    The observer notes this rank's part of the matrix before and after the step.  The trial's seed and repeat choose the
    matrix and the step.

    Returns:
        The observer.  None if the trial cannot be checked (:func:`~.single_process.checked_step`), or if this rank's
        optimizer is not Muon.
    """
    step = checked_step(trial)
    if step is None or not isinstance(optimizer, Muon):
        return None
    matrices, rank = optimizer.owners.matrices, zero.wire.mesh.rank
    matrix = matrices[draw(f"{trial.seed}/{trial.repeat}/stepped matrix", len(matrices))]
    unit = zero.units[matrix.unit]
    start, end = unit.geometry.part(matrix.slot, rank)
    spans = zip(unit.geometry.spans(rank), unit.master_shard.masters, strict=True)
    master, first = next((m, span[1]) for span, (group, m) in spans if group == matrix.slot.spec.group)
    part = slice(start - first, end - first)
    return MatrixWitness(optimizer, matrix, master, part, step, rank)


def compare_step(trial: Trial, index: int, zero: Zero, witness: MatrixWitness) -> str | None:
    """Recompute Muon's step of one whole matrix, and compare the result with the matrix after step ``index``.

    ``witness`` (:func:`watch`) has noted this rank's part of the matrix, of its momentum and of its gradient.  All
    ranks must call this function.

    Returns:
        A sentence on the element that differs most.  None if all elements are within the tolerance, or if the optimizer
        skipped the step.
    """
    parts, unit, slot = witness.parts, zero.units[witness.matrix.unit], witness.matrix.slot
    if parts is None:  # the step was skipped, on all ranks
        return None
    number = unit.geometry.slots.index(slot)
    with zero.wire.observed(Observer()):
        value, momentum, gradient, after = (
            WholeValues(unit).gather_member(number, part)
            for part in (parts.value, parts.momentum, parts.gradient, parts.after)
        )
    geometry = unit.geometry
    bounds = [geometry.overlap(slot, rank) for rank in range(geometry.shards)]
    places = [(first - slot.offset, end - slot.offset) for first, end in bounds]
    expected, rate = muon_step(trial, index, value, momentum, gradient, zero.policy.owned, places)
    # Both multiply in bf16, and may add up in another order.
    off = (after - expected).abs() - (_MUON_ULPS * expected.abs() + _MUON_ERROR * rate)
    if bool((off <= 0).all()):
        return None
    at = int(off.argmax())
    return (
        f"after step {index} element {at} of matrix {slot.spec.name!r} is {float(after.view(-1)[at]):.9g}, but "
        f"Muon gives {float(expected.view(-1)[at]):.9g} from the matrix's whole momentum and gradient"
    )


def muon_step(  # noqa: PLR0917  # its arguments are one step
    trial: Trial,
    index: int,
    value: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    owned: tuple[Codec, Codec],
    places: Sequence[tuple[int, int]],
) -> tuple[Tensor, float]:
    """Compute one step of a whole matrix by the formula of ``torch.optim.Muon``.

    In training, one rank owns the matrix.  All ranks send their parts of the momentum to the owner, which
    orthogonalises the matrix and sends parts of the result (the update) back.  Here, too, each part is encoded and
    decoded.

    Args:
        trial: The trial, whose optimizer is Muon.
        index: Number of the step, which decides the learning rate.
        value: The matrix (rows, columns) before the step.
        momentum: The momentum, of the same shape, before the step.
        gradient: The mean gradient, of the same shape.
        owned: The codec in which parts of the momentum are sent, and the codec in which parts of the update are sent.
        places: Each rank's part of the flattened matrix, as (first element, element after the last).

    Returns:
        (matrix after the step, learning rate as Muon adjusts it to the matrix's shape).
    """

    def sent(codec: Codec, whole: Tensor) -> Tensor:
        decoded = whole.float().contiguous()
        for first, end in places:
            part = decoded.view(-1)[first:end].clone()
            frame = torch.empty(codec.frame_bytes(end - first), dtype=torch.uint8, device=part.device)
            reference.encode(codec, part, frame)
            reference.decode(codec, frame, part)
            decoded.view(-1)[first:end] = part
        return decoded

    arguments, _ = muon_arguments(trial.optimizer)
    optimizer = torch.optim.Muon([nn.Parameter(value)], **arguments)  # gives all options their defaults
    set_rates(optimizer, trial.schedule(), index)
    (how,) = optimizer.param_groups
    direction = momentum.lerp(gradient, 1 - how["momentum"])
    if how["nesterov"]:
        direction = gradient.lerp(direction, how["momentum"])
    options = how["ns_coefficients"], how["ns_steps"], how["eps"]
    update = sent(owned[1], torch_muon._zeropower_via_newtonschulz(sent(owned[0], direction), *options))  # noqa: SLF001
    rate = torch_muon._adjust_lr(how["lr"], how["adjust_lr_fn"], value.shape)  # noqa: SLF001
    return value * (1 - how["lr"] * how["weight_decay"]) - rate * update, rate
