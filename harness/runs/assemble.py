"""Merges the outcomes of all ranks of a trial into its record, and checks that they agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness.measure.cpu_usage import Spent
from harness.records import checks
from harness.records.record import Predicted, ProcessorUse, Record, Validation
from harness.runs.correctness_checks import TrialError, agree, check_gradient, check_loss, merge
from harness.runs.rank_trial import Outcome


def assemble(outcomes: Sequence[Outcome], blank: Record) -> Record:
    """Assemble the record of a trial from all ranks' outcomes, in rank order, and one without measurements.

    The first check that its results do not pass is a TrialError.
    """
    _refuse(_wrong_inputs(outcomes, blank))
    compared = merge([outcome.compared for outcome in outcomes], blank.trial)
    _refuse(_wrong_training(outcomes, control=blank.trial.get("control") is not None))
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
            **compared,
        }
    )
    checked = [outcome.checked for outcome in outcomes]
    sent = (
        checks.unpredicted(found),
        checks.miscounted(found),
        checks.other_codec(found),
        checks.off_rate(found, above=True),
    )
    _refuse(filter(None, (checks.untrained(checked, found.ranks), *sent)))
    return found


def _refuse(wrong: Iterator[str]) -> None:
    """Raise the first of what is wrong."""
    if (why := next(wrong, None)) is not None:
        raise TrialError(why)


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


def _wrong_training(outcomes: Sequence[Outcome], *, control: bool) -> Iterator[str]:
    """Losses that are not finite, later ones and gradients that are not a single process's, overflows that
    skipped every step, budgets that chose differently, generations of a rank that differ.
    """
    first = outcomes[0]
    for outcome in outcomes:
        for step in outcome.record.steps:
            if not math.isfinite(step.loss):
                yield f"the loss of rank {outcome.record.rank} is {step.loss} in step {step.index}"
    for rank, outcome in enumerate([] if control else outcomes):
        trained = {step.index: step.loss for step in outcome.record.steps}
        for loss in outcome.compared.later_losses:
            check_loss(rank, loss)
            if loss.trained is not None and not agree(trained[loss.step], loss.trained):
                yield (
                    f"rank {rank} trained in step {loss.step} at a loss of {trained[loss.step]:.6f}, one "
                    f"process with equal weights at {loss.trained:.6f}"
                )
        for error in outcome.compared.gradient_errors:
            if error.step:
                check_gradient(rank, error)
    scaler, count = first.ran.get("loss_scale"), len(first.record.steps)
    if scaler is not None and count and scaler["skipped"] >= count:
        yield (
            f"all {count} steps were skipped: gradients overflow, at last at a loss scale of "
            f"{scaler['scale']:g}; start from a smaller one"
        )
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
