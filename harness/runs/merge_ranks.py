"""Merges what all ranks of a trial measured into the trial's record, and checks the record.

The checks compare the ranks with each other, the sharded model with a single process, the errors of codecs with their
bounds, and numbers of the record with each other (:mod:`harness.records.record_checks`).  A trial that fails a check
has no result.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from harness.measure import communication_error
from harness.measure.gradient_bounds import GradientError
from harness.records import record_checks
from harness.records.training_faults import slowed, training_fault
from harness.records.trial_record import (
    AdapterCounters,
    GradientCheck,
    Predicted,
    RankRecord,
    Record,
    Step,
    Validation,
)
from harness.reference_checks.comparison import Compared, TrialError
from harness.reference_checks.single_process import TOLERANCE, same_loss
from harness.runs.rank_trial import Outcome
from harness.suites.trial import Trial
from impl.policy.policy import Policy


def assemble(outcomes: Sequence[Outcome], blank: Record) -> Record:
    """Merge what a trial's ranks measured into the trial's record, check the record, and return it.

    Args:
        outcomes: What each rank measured (:class:`~harness.runs.rank_trial.Outcome`), in the order of ranks.
        blank: The trial's record without measurements, as it was made before the ranks ran.

    Raises:
        TrialError: If a check fails; the message describes the first failed check.
    """
    first, compared = outcomes[0], [outcome.compared for outcome in outcomes]
    ranks, spent = [outcome.record for outcome in outcomes], [outcome.spent for outcome in outcomes]
    predicted, processor_use = None, spent[0]
    costs = [outcome.compared.costs | outcome.checked.costs for outcome in outcomes]
    trained = blank.trial.get("workload", "train") == "train"
    if first.predicted is not None:
        ledgers, unpredicted = [outcome.predicted or [] for outcome in outcomes], list(first.unpredicted)
        equal = None if unpredicted else [rank.ledger for rank in ranks] == ledgers
        by_step = [outcome.predicted_by_step for outcome in outcomes if outcome.predicted_by_step]
        predicted = Predicted(ledgers=ledgers, equal=equal, unpredicted=unpredicted, sent_by_step=by_step)
    if processor_use is not None:
        seconds = math.fsum(use.ranks for use in spent if use is not None)
        processor_use = processor_use.model_copy(update={"ranks": seconds})
    record = blank.model_copy(
        update={
            "ranks": ranks,
            "interfaces": [outcome.sent for outcome in outcomes if outcome.sent is not None] or None,
            "adapters": [
                _with_ledger(o.adapters, ranks, trained) for o in outcomes if o.adapters is not None
            ],
            "validations": [_mean(shares) for shares in zip(*(o.validations for o in outcomes), strict=True)],
            "predicted": predicted,
            "ran": first.ran,
            "units": first.units,
            "parameters": first.parameters,
            "machine_use": [o.machine_use for o in outcomes if o.machine_use is not None],
            "decoded_sha256": [outcome.decoded[0] for outcome in outcomes if outcome.decoded],
            "processor_use": processor_use,
            "chosen_codecs": first.chosen,
            "reference_loss": _reference_loss(compared),
            "first_gradients": _gradient_checks([e for rank in compared for e in rank.gradient_errors]),
            "check_seconds": round(max(o.compared.seconds + o.checked.seconds for o in outcomes), 6),
            "check_cpu_seconds": {
                check: round(seconds, 6)
                for check, seconds in max(costs, key=lambda by_check: math.fsum(by_check.values())).items()
            },
            "communication_errors": communication_error.combine([dict(c.communicated) for c in compared]),
            "quantisation": compared[0].errors,
            "lossless": compared[0].lossless,
        }
    )
    if (error := next(_errors(outcomes, record), None)) is not None:
        losses = _until_infinite([_mean_loss(steps) for steps in zip(*(r.steps for r in ranks), strict=True)])
        known = len(_until_infinite([validation.loss for validation in record.validations]))
        raise TrialError(error, losses, record.validations[:known])
    return record


def _with_ledger(adapters: AdapterCounters, ranks: Sequence[RankRecord], trained: bool) -> AdapterCounters:
    """Return a node's adapter counters, with ``booked_bytes`` filled in from the ledgers of the node's ranks.

    A rank's ledger is our engine's own count of the bytes that the rank sent.  ``booked_bytes`` are the bytes that
    these ledgers say were sent to other nodes; they can be compared with the counters.  If a rank of the node has no
    ledger, ``adapters`` is returned unchanged.

    Args:
        adapters: The counters of the node's network adapters.
        ranks: Records of all ranks.
        trained: Whether the trial's workload is training.  If True, bytes of evaluations are left out, since the
            counters do not include these bytes either.
    """
    ledgers = [rank.ledger for rank in ranks if rank.node == adapters.node]
    if None in ledgers:
        return adapters
    rows = [row for ledger in ledgers for row in ledger or [] if row.link == "inter"]
    rows = [row for row in rows if not trained or row.phase != "evaluate"]
    return adapters.model_copy(update={"booked_bytes": sum(row.bytes for row in rows)})


def _reference_loss(compared: Sequence[Compared]) -> float | None:
    """Return the loss that a single process computed before training; None if the trial did not compute it.

    The single process computes a loss for the batches of each rank; the result is the mean of these losses.
    """
    losses = [loss.reference for rank in compared for loss in rank.losses if loss.step == 0]
    return math.fsum(losses) / len(losses) if losses else None


def _mean_loss(steps: Sequence[Step]) -> float:
    """Return the mean of all ranks' losses in one step."""
    return math.fsum(step.loss for step in steps) / len(steps)


def _until_infinite(losses: Sequence[float]) -> list[float]:
    """Return the leading losses that are finite: all losses before the first infinity or NaN."""
    return [*itertools.takewhile(math.isfinite, losses)]


def _mean(shares: Sequence[Validation]) -> Validation:
    """Merge all ranks' results of one validation: the mean loss, the longest training time, and the sum of the bytes.

    The bytes are those that training has sent between nodes until the validation.  They are None if they are None on
    any rank.
    """
    known = [share.inter_bytes for share in shares if share.inter_bytes is not None]
    return Validation(
        step=shares[0].step,
        loss=math.fsum(share.loss for share in shares) / len(shares),
        train_seconds=max(share.train_seconds for share in shares),
        inter_bytes=sum(known) if len(known) == len(shares) else None,
    )


def _gradient_checks(compared: Sequence[GradientError]) -> list[GradientCheck]:
    """Merge the gradient errors of all ranks into one check for each step and unit.

    A unit is a set of parameters that are reduced together.  A check has the number of elements that all ranks together
    compared, and the largest :attr:`GradientError.share` of any rank.  A share compares an element of the reduced
    gradient with the same element of a single process's gradient: it is the difference between the two, divided by the
    allowed difference, and should be at most 1.
    """
    by_unit: dict[tuple[int, str], list[GradientError]] = defaultdict(list)
    for error in compared:
        by_unit[error.step, error.unit].append(error)
    return [
        GradientCheck(
            unit=unit,
            elements=sum(error.elements for error in errors),
            share=max(error.share for error in errors),
            step=step,
        )
        for (step, unit), errors in by_unit.items()
    ]


def _errors(outcomes: Sequence[Outcome], record: Record) -> Iterator[str]:
    """Yield a sentence for each fault that the checks find in a trial's results.

    Faults before training come first, then faults of later steps, then contradictions inside the merged record.

    Args:
        outcomes: The outcomes, by rank.
        record: The record that was merged from the outcomes.
    """
    first, control, tokens = outcomes[0], record.trial.get("control"), record.inputs.get("corpus")
    scaler, count = first.ran.get("loss_scale"), len(first.record.steps)
    checked = [outcome.checked for outcome in outcomes]
    for rank, outcome in enumerate(outcomes):
        if outcome.checked.kernel is not None:
            yield outcome.checked.kernel
        for codec, digest in outcome.ran.get("own_codecs", {}).items():
            if digest != (expected := first.ran["own_codecs"][codec]):
                yield (
                    f"codec {codec} decodes the same elements differently on rank {rank} (SHA-256 "
                    f"{digest[:12]}) than on rank 0 ({expected[:12]}): a codec must give equal values on all machines"
                )
        digest = outcome.ran["corpus_sha256"]
        if tokens is not None and digest not in ("", tokens):
            yield (
                f"rank {rank} read other tokens from the corpus (SHA-256 {digest[:12]}) than the process that "
                f"started it ({tokens[:12]}): a corpus must give the same tokens each time and on every machine"
            )
        yield from _reference_errors(rank, outcome, later=False, gradients=control != "unordered")
    drawn = communication_error.combine([dict(outcome.compared.drawn) for outcome in outcomes])
    for errors in (record.communication_errors, drawn):
        if errors and not control:
            policy = Trial.from_canonical(record.trial).resolved_policy() or Policy()
            if (error := communication_error.refusal(errors, policy, len(outcomes))) is not None:
                yield error
    if scaler is not None and count and scaler["skipped"] >= count:
        yield (
            f"all {count} steps were skipped because gradients overflowed, the last step at a loss scale of "
            f"{scaler['scale']:g}; set policy.loss_scale to a smaller number, or to a dynamic scale that begins at a "
            "smaller number, such as 'dynamic:from1024'"
        )
    for rank, outcome in enumerate(outcomes):
        if outcome.compared.wrong is not None:
            yield f"rank {rank}: {outcome.compared.wrong}"
        for step in outcome.record.steps:
            if not math.isfinite(step.loss):
                yield f"the loss of rank {rank} is {step.loss} in step {step.index}"
        if not control:
            yield from _reference_errors(rank, outcome, later=True)
    for validation in record.validations:
        if not math.isfinite(validation.loss):
            yield f"the validation loss after step {validation.step} is {validation.loss}"
    for rank, outcome in enumerate(outcomes):
        if outcome.chosen != first.chosen:
            yield f"rank {rank} chose other codecs for its bit budget than rank 0"
        for number, digest in enumerate(outcome.decoded):
            if digest != outcome.decoded[0]:  # all generations have the same prompt and weights
                yield (
                    f"generation {number} of rank {rank} decoded other tokens (SHA-256 {digest[:12]}) than "
                    f"generation 0 ({outcome.decoded[0][:12]}) from the same prompt and weights"
                )
    inconsistent = (
        record_checks.ledger_mismatch(record),
        record_checks.interface_mismatch(record),
        record_checks.codec_mismatch(record),
        record_checks.codec_mismatch(record.model_copy(update={"communication_errors": drawn})),
        record_checks.rate_mismatch(record, above=True),
        record_checks.secondary_mismatch(record),
        training_fault(checked, record.ranks, record.validations),
        slowed(checked, record),
    )
    yield from filter(None, inconsistent)


def _reference_errors(rank: int, outcome: Outcome, *, later: bool, gradients: bool = True) -> Iterator[str]:
    """Yield a sentence for each loss or reduced gradient that differs from a single process's by more than is allowed.

    Args:
        rank: Number of the rank.
        outcome: The outcome of this rank.
        later: True to judge the comparisons that were made for later steps, False to judge the comparison that was made
            before training.
        gradients: Whether to judge gradients as well as losses.
    """
    trained = {step.index: step.loss for step in outcome.record.steps}
    for loss in outcome.compared.losses:
        sharded = loss.expected if loss.sharded is None else loss.sharded
        if bool(loss.step) == later and not same_loss(sharded, loss.expected):
            yield (
                f"{_when(loss.step)} the loss of rank {rank} is {sharded:.6f}, but a single process with "
                f"equal weights and batches has {loss.expected:.6f}: they differ by more than {TOLERANCE:g}"
            )
        if later and loss.trained is not None and not same_loss(trained[loss.step], loss.trained):
            yield (
                f"in step {loss.step} rank {rank} trained at a loss of {trained[loss.step]:.6f}, but a single "
                f"process with equal weights and batches has {loss.trained:.6f}"
            )
    for error in outcome.compared.gradient_errors if gradients else ():
        if bool(error.step) == later and not error.share <= 1:
            yield (
                f"{_when(error.step)} rank {rank}'s reduced gradient of unit {error.unit!r} has an "
                f"element {error.reduced:.6g} that is {error.expected:.6g} in a single process: they differ by "
                f"more than the codecs allow, {error.allowed:.3g}"
            )


def _when(step: int) -> str:
    return f"in step {step}" if step else "before training"
