"""Checks the consistency of a record with itself.  No torch.

Each check returns a sentence that names the first inconsistency, or None:

- :func:`ledger_mismatch`: bytes and messages that were booked equal those that were predicted.
- :func:`interface_mismatch`: the nodes' network interfaces counted as many bytes as the ledgers hold.
- :func:`rate_mismatch`: the link had the requested rate.
- :func:`codec_mismatch`: messages were encoded with the codecs of the trial's policy.
- :func:`training_fault`: batches, gradient norms and times of all ranks fit together.

The harness fails a trial that does not pass, and a report applies the checks to old records again.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from harness.records.packet_sizes import HEADER_BYTES, SEGMENT_BYTES
from harness.records.trial_record import LedgerRow, RankRecord, Record
from harness.suites.trial import Trial

INTERFACE_WITHIN: Final = (
    0.99,
    1.02,
)  # bytes that an interface counts, as a share of the ledger's bytes plus headers
# Bytes that gloo itself may send with one of our messages.  A ring sends a message in two parts, and gloo sends two
# announcements and a header with each part; each of these three takes 48 bytes.
CONTROL_BYTES: Final = 2 * 3 * 48
RATE_WITHIN: Final = (0.95, 1.05)  # rate that probes may measure, as a share of the requested rate
_COVERED: Final = 0.97  # steps add up to at least this share of the time from the first to the last
_TICK: Final = 0.005  # seconds for each step that reading clocks and reporting progress may take
_SLEPT: Final = (
    0.1,
    0.01,
)  # seconds that a rank may sleep without waiting for messages: in all, and for each step
_AWAKE: Final = 0.5  # least share of its sleep that a rank must have recorded as waiting for messages
_ROUNDED: Final = 0.01  # seconds by which two clocks may differ
_BARRIERS: Final = (
    4  # barriers around the timed steps, and as many around each validation, which itself is not counted
)


def ledger_mismatch(record: Record) -> str | None:
    """Return how the recorded ledgers differ from the recorded predictions; None if they are equal or missing."""
    if record.predicted is None:
        return None
    predicted = record.predicted.ledgers
    if len(predicted) != len(record.ranks):
        return f"{len(predicted)} ledgers are predicted for {len(record.ranks)} ranks"
    for rank, ledger in zip(record.ranks, predicted, strict=True):
        booked, expected = _by_key(rank.ledger or []), _by_key(ledger)
        for key in sorted(booked.keys() | expected.keys()):
            sent, wanted = booked.get(key, (0, 0)), expected.get(key, (0, 0))
            if sent != wanted:
                row = f"{sent[0]} bytes in {sent[1]} messages for {', '.join(filter(None, key))}"
                prediction = f"predicted are {wanted[0]} bytes in {wanted[1]} messages"
                return f"rank {rank.rank} sent {row}; {prediction}"
    return (
        None if record.predicted.equal else "the record states that its ledgers differ from its predictions"
    )


def _by_key(ledger: Sequence[LedgerRow]) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return (bytes, messages) by phase, purpose, unit, hop and link."""
    return {
        (row.phase, row.purpose, row.unit, row.hop, row.link): (row.bytes, row.messages) for row in ledger
    }


def interface_mismatch(record: Record) -> str | None:
    """Return how a node's interface counter differs from its ranks' ledgers; None if all agree or one is missing."""
    header = record.link.details.get("header_bytes", HEADER_BYTES) if record.link else HEADER_BYTES
    decodes = record.trial.get("workload", "train") != "train"
    world, validated = len(record.ranks), len(record.validations)
    for counters in record.interfaces or []:
        ledgers = [rank.ledger for rank in record.ranks if rank.node == counters.node]
        if not ledgers or None in ledgers:
            continue
        rows = [row for ledger in ledgers for row in ledger or [] if row.link == "inter"]
        rows = [row for row in rows if decodes or row.phase != "evaluate"]
        barriers = _BARRIERS * (1 + validated) * math.ceil(math.log2(world)) * len(ledgers)
        messages = sum(row.messages for row in rows) + barriers
        booked, headers = sum(row.bytes for row in rows), header * counters.tx_packets
        if (mismatch := counter_mismatch(counters.tx_bytes, booked, headers, messages)) is not None:
            return f"node {counters.node}'s interface {mismatch}"
    return None


def counter_mismatch(counted: int, ledger: int, headers: int, messages: int) -> str | None:
    """Return how an interface's counter differs from the bytes that explain it; None if it does not.

    Args:
        counted: Bytes that the interface sent.
        ledger: Bytes that the node's ranks booked.
        headers: Bytes of the packets' headers.
        messages: Number of messages, for each of which gloo may send ``CONTROL_BYTES`` of its own.
    """
    low, high = INTERFACE_WITHIN
    stated, control = ledger + headers, CONTROL_BYTES * messages
    if low * stated <= counted <= high * stated + control:
        return None
    return (
        f"sent {counted} bytes in the timed steps; its ledger holds {ledger}, and packet headers take {headers}: "
        f"{counted / stated if stated else math.nan:.3f} of their sum, where {low:g} to {high:g} is allowed, "
        f"plus {control} bytes of gloo's own messages"
    )


@dataclass(slots=True)
class Checked:
    """What one rank noted while it trained (:mod:`harness.measure.training_checks`), for :func:`training_fault`."""

    kernel: str | None = None  # how the first wrong codec kernel differs from the reference
    wrong: str | None = None  # the first fault that this rank found itself
    losses: list[float] = field(
        default_factory=list
    )  # of every step: mean of the losses that its passes returned
    replayed: int = 0  # optimizer steps that were replayed and found right
    linked: int = 0  # steps whose optimizer got the same gradients as an untimed rehearsal of the step gave
    # SHA-256 of this rank's inputs and targets by step, and of the inputs and targets that the seed gives the next
    # rank.
    batches: dict[int, str] = field(default_factory=dict)
    of_next_rank: dict[int, str] = field(default_factory=dict)
    seconds: float = (
        0.0  # from the beginning of the first timed step to the end of the last, without ``untimed``
    )
    step_seconds: list[float] = field(default_factory=list)  # of every step, by a second clock around it
    slept: list[float] = field(default_factory=list)  # seconds of a step in which the thread slept, if known
    # Seconds in which the thread could run but waited for a CPU, outside of timed steps and of ``untimed``.
    stalled: float = 0.0
    untimed: float = 0.0  # seconds of evaluations and checks between steps, so far


def training_fault(checked: Sequence[Checked], ranks: Sequence[RankRecord]) -> str | None:
    """Return the first way in which training was not as the trial asks; None if nothing is wrong.

    Args:
        checked: What each rank noted, by rank.
        ranks: Records of the ranks, by rank.
    """
    missed: list[str] = []
    for rank, check in enumerate(checked):
        if check.wrong is not None:
            return check.wrong
        drawn = checked[rank - 1].of_next_rank
        for step, digest in check.batches.items():
            if digest != drawn.get(step):
                read = f"in step {step} rank {rank} read another batch (SHA-256 {digest[:12]})"
                return f"{read} than the seed gives this rank ({drawn.get(step, 'none')[:12]})"
        steps = ranks[rank].steps
        for step_record, loss in zip(steps, check.losses, strict=False):  # trials that generate have no steps
            if not math.isclose(step_record.loss, loss, rel_tol=1e-6) and math.isfinite(loss):
                return (
                    f"in step {step_record.index} rank {rank} trained at a loss of {loss:.6f}, but "
                    f"{step_record.loss:.6f} is on record"
                )
        for timed_step, seconds in zip(steps, check.step_seconds, strict=False):  # as above
            if timed_step.total > seconds + _ROUNDED:
                took = f"step {timed_step.index} of rank {rank} is recorded with {timed_step.total:.3f} s"
                return (
                    f"{took}, but a second clock around it shows {seconds:.3f} s: the clock counts too much"
                )
        timed = [step.total for step in steps if not step.warmup]
        total, passed = math.fsum(timed), check.seconds - check.stalled
        sums = f"the timed steps of rank {rank} add up to {total:.3f} s, but {passed:.3f} s passed"
        if timed and total < _COVERED * passed - _TICK * len(timed):
            missed.append(f"{sums}: the clock misses a part of them")
    if missed and len(missed) == len(checked):  # a busy machine may delay single ranks, but not all
        return missed[0]
    for by_rank in zip(*(rank.steps for rank in ranks), strict=True):
        norms = [step.gradient_norm for step in by_rank if step.gradient_norm is not None]
        if norms and not max(norms) - min(norms) <= 1e-6 * abs(max(norms)) and math.isfinite(sum(norms)):
            listed = ", ".join(f"{norm:.6g}" for norm in norms)
            return f"gradient norms of step {by_rank[0].index} differ between ranks: {listed}"
    for rank, check in enumerate(checked):  # a rank sleeps mostly because it waits for messages
        exposed = [step.exposed for step in ranks[rank].steps if step.exposed is not None]
        waited, slept, count = math.fsum(exposed), math.fsum(check.slept), len(check.slept)
        if len(exposed) == count and waited < _AWAKE * slept - _SLEPT[0] - _SLEPT[1] * count:
            wait = f"waited {waited:.3f} s for messages in {count} steps"
            return f"rank {rank} recorded that it {wait}, but its thread slept for {slept:.3f} s in them"
    return None


def codec_mismatch(record: Record) -> str | None:
    """Return which message was encoded with a codec that the trial's policy does not have; None if there is none."""
    if not record.communication_errors:
        return None
    policy = Trial.from_canonical(record.trial).resolved_policy()
    if policy is None:
        return None
    policies = [policy, policy.for_kind(persistent=True), policy.for_kind(trainable=False)]
    known = {str(codec) for variant in policies for codec in (*variant.codecs, variant.copy_codec)}
    unblocked = partial(re.sub, r":[0-9]+", "")  # a codec without the size of its blocks
    if policy.blocks == "shape":  # the size of blocks then differs from unit to unit
        known |= {unblocked(text) for text in known}
    for error in record.communication_errors:
        if error.codec and not known & {error.codec, unblocked(error.codec)}:
            hop = "" if error.hop is None else f" in hop {error.hop}"
            sent = f"{error.purpose} of {error.unit or 'all units'} were sent as {error.codec}{hop}"
            return f"in step {error.step} {sent}; the trial's policy has {', '.join(sorted(known))}"
    return None


def header_bytes(row: LedgerRow) -> int:
    """Return the bytes of packet headers of a row's messages.

    The messages are taken to be equally long, and to be cut into packets with ``SEGMENT_BYTES`` of payload.
    """
    return HEADER_BYTES * row.messages * math.ceil(row.bytes / max(row.messages, 1) / SEGMENT_BYTES)


def rate_mismatch(record: Record, *, above: bool = False) -> str | None:
    """Return how the probed link misses the requested rate; None if it does not, or was not probed.

    With ``above``, only a link that is too fast is reported.
    """
    link = record.link
    if link is None or link.requested_mbit is None or not link.probed_mbit:
        return None
    share = statistics.median(link.probed_mbit) / link.requested_mbit
    if share <= RATE_WITHIN[1] and (above or share >= RATE_WITHIN[0]):
        return None
    return f"its link carried {share:.1%} of {link.requested_mbit:g} Mbit/s"
