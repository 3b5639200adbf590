"""Merges the outcomes of all ranks of a trial into its record, and checks that they agree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from harness.measure import communication_error
from harness.measure.cpu_usage import Spent
from harness.measure.gradient_bounds import GradientError
from harness.records import consistency
from harness.records.record import GradientCheck, Predicted, ProcessorUse, Record, Validation
from harness.runs.correctness_checks import TOLERANCE, Compared, TrialError, same_loss
from harness.runs.rank_trial import Outcome
from harness.suites.trial import Trial
from impl.plan.policy import Policy


def assemble(outcomes: Sequence[Outcome], blank: Record) -> Record:
    """The record of a trial by all ranks' outcomes, in order; a TrialError for the first check that fails."""
    control, compared = blank.trial.get("control"), [outcome.compared for outcome in outcomes]
    wrong = [*_wrong_inputs(outcomes, blank), *_wrong_losses(outcomes, later=False)]
    wrong += _wrong_gradients(compared, later=False) if control != "unordered" else ()
    later = list(_wrong_steps(outcomes))
    if not control:
        later += [*_wrong_losses(outcomes, later=True), *_wrong_gradients(compared, later=True)]
    later += _wrong_choices(outcomes)
    validations = [_mean(shares) for shares in zip(*(o.validations for o in outcomes), strict=True)]
    processor_use = _processor_use([outcome.spent for outcome in outcomes])
    first = outcomes[0]
    predicted = None
    if first.predicted is not None:
        ledgers = [outcome.predicted or [] for outcome in outcomes]
        equal = [outcome.record.ledger for outcome in outcomes] == ledgers
        predicted = Predicted(ledgers=ledgers, equal=equal)
    found = blank.model_copy(
        update={
            "ranks": [outcome.record for outcome in outcomes],
            "interfaces": [outcome.sent for outcome in outcomes if outcome.sent is not None] or None,
            "validations": validations,
            "predicted": predicted,
            "ran": first.ran,
            "units": first.units,
            "parameters": first.parameters,
            "machine_use": [one.machine_use for one in outcomes if one.machine_use is not None],
            "decoded_sha256": [outcome.decoded[0] for outcome in outcomes if outcome.decoded],
            "processor_use": processor_use,
            "chosen_codecs": first.chosen,
            "reference_loss": math.fsum(rank.first_loss.reference for rank in compared) / len(compared),
            "first_gradients": _gradient_checks(compared),
            "quantisation": compared[0].errors,
        }
    )
    checked = [outcome.checked for outcome in outcomes]
    communicated = communication_error.errors_of([dict(rank.communicated) for rank in compared])
    found = found.model_copy(update={"communication_errors": communicated})
    if communicated and not control:
        policy = Trial.from_canonical(blank.trial).resolved_policy() or Policy()
        wrong += filter(None, [communication_error.refusal(communicated, policy)])
    if wrong := [*wrong, *later]:
        raise TrialError(wrong[0])
    sent = (
        consistency.unpredicted(found),
        consistency.miscounted(found),
        consistency.other_codec(found),
        consistency.off_rate(found, above=True),
    )
    inconsistent = filter(None, (consistency.untrained(checked, found.ranks), *sent))
    if (why := next(inconsistent, None)) is not None:
        raise TrialError(why)
    return found


def _processor_use(spent: Sequence[Spent]) -> ProcessorUse | None:
    """CPU usage of the machine as rank 0 read it, with the CPU seconds of all ranks."""
    first, machine = spent[0], spent[0].machine
    if machine is None:
        return None
    return ProcessorUse(
        seconds=first.seconds,
        processors=first.processors,
        ranks=math.fsum(rank.computed for rank in spent),
        **machine,
    )


def _mean(shares: Sequence[Validation]) -> Validation:
    """Combine all ranks' shares of one validation."""
    known = [share.inter_bytes for share in shares if share.inter_bytes is not None]
    return Validation(
        step=shares[0].step,
        loss=math.fsum(share.loss for share in shares) / len(shares),
        train_seconds=max(share.train_seconds for share in shares),
        inter_bytes=sum(known) if len(known) == len(shares) else None,
    )


def _wrong_inputs(outcomes: Sequence[Outcome], blank: Record) -> Iterator[str]:
    """Kernels unlike the reference, own codecs that decode differently, tokens unlike those on record."""
    first = outcomes[0]
    for outcome in outcomes:
        if outcome.checked.kernel is not None:
            yield outcome.checked.kernel
        rank, named = outcome.record.rank, outcome.ran.get("own_codecs", {})
        for codec, digest in named.items():
            if digest != (expected := first.ran["own_codecs"][codec]):
                yield (
                    f"codec {codec} decodes the same elements on rank {rank} to others (SHA-256 "
                    f"{digest[:12]}) than on rank {first.record.rank} ({expected[:12]})"
                )
        found, known = outcome.ran["corpus_sha256"], blank.inputs.get("corpus")
        if known is not None and found not in ("", known):
            yield (
                f"rank {rank} has other tokens (SHA-256 {found[:12]}) of the corpus than the process that "
                f"started it ({known[:12]}): expected what gives the same each time, on every machine"
            )


def _wrong_losses(outcomes: Sequence[Outcome], *, later: bool) -> Iterator[str]:
    """Losses before training, or before later steps and in them, that are not a single process's."""
    for rank, outcome in enumerate(outcomes):
        trained = {step.index: step.loss for step in outcome.record.steps}
        for loss in outcome.compared.later_losses if later else [outcome.compared.first_loss]:
            if not same_loss(loss.found, loss.expected):
                yield (
                    f"{_when(loss.step)} the loss of rank {rank} is {loss.found:.6f}, of a single process on "
                    f"the same batches with equal weights {loss.expected:.6f}: more than {TOLERANCE:g} apart"
                )
            if loss.trained is not None and not same_loss(trained[loss.step], loss.trained):
                yield (
                    f"rank {rank} trained in step {loss.step} at a loss of {trained[loss.step]:.6f}, one "
                    f"process with equal weights at {loss.trained:.6f}"
                )


def _wrong_gradients(ranks: Sequence[Compared], *, later: bool) -> Iterator[str]:
    """Reduced gradients that are farther from a single process's than the codecs promise."""
    for rank, compared in enumerate(ranks):
        for error in compared.gradient_errors:
            if bool(error.step) == later and not error.share <= 1:
                yield (
                    f"{_when(error.step)} rank {rank}'s reduced gradient of unit {error.unit!r} has an "
                    f"element {error.found:.6g}, a single process's {error.expected:.6g}: they differ by "
                    f"more than the codecs allow, {error.allowed:.3g}"
                )


def _when(step: int) -> str:
    return f"before step {step}" if step else "before training"


def _gradient_checks(ranks: Sequence[Compared]) -> list[GradientCheck]:
    """What all ranks compared, by step and unit."""
    found: dict[tuple[int, str], list[GradientError]] = defaultdict(list)
    for rank in ranks:
        for error in rank.gradient_errors:
            found[error.step, error.unit].append(error)
    return [
        GradientCheck(
            unit=unit,
            elements=sum(error.elements for error in errors),
            share=max(error.share for error in errors),
            step=step,
        )
        for (step, unit), errors in found.items()
    ]


def _wrong_steps(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Losses that are not finite, and overflows that skipped every step."""
    first = outcomes[0]
    for outcome in outcomes:
        for step in outcome.record.steps:
            if not math.isfinite(step.loss):
                yield f"the loss of rank {outcome.record.rank} is {step.loss} in step {step.index}"
    scaler, count = first.ran.get("loss_scale"), len(first.record.steps)
    if scaler is not None and count and scaler["skipped"] >= count:
        yield (
            f"all {count} steps were skipped: gradients overflow, at last at a loss scale of "
            f"{scaler['scale']:g}; start from a smaller one"
        )


def _wrong_choices(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Budgets that chose differently, and generations of a rank that differ."""
    first = outcomes[0]
    for outcome in outcomes:
        if outcome.chosen != first.chosen:
            yield f"rank {outcome.record.rank} chose other codecs within its budget than rank 0"
        for number, digest in enumerate(outcome.decoded):
            if digest != outcome.decoded[0]:  # prompt and weights are equal
                yield (
                    f"generation {number} of rank {outcome.record.rank} decoded other tokens (SHA-256 "
                    f"{digest[:12]}) than generation 0 ({outcome.decoded[0][:12]}) from the same prompt and "
                    "weights"
                )
