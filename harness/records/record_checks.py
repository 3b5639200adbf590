"""Checks of a record from its own rows: ledger against prediction, interfaces against the ledger, training.

The harness fails a trial that they refuse; a report applies them to records again.  No torch.
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

INTERFACE_WITHIN: Final = (0.99, 1.02)  # what a node's interface may count, as a share of ledger and headers
# gloo announces a message from both sides and frames it, 48 bytes each; a ring's in two parts.
CONTROL_BYTES: Final = 2 * 3 * 48
RATE_WITHIN: Final = (0.95, 1.05)  # what probes may measure, as a share of the requested rate
_COVERED: Final = 0.9  # least share of the time around them that steps take
_BESIDE: Final = (0.1, 0.01)  # seconds, and seconds a step, that a busy machine takes between steps
_AWAKE: Final = 0.5  # least share of the time that a rank sleeps in which it waits for messages
_ROUNDED: Final = 0.01  # seconds by which readings of the clock differ
_BARRIERS: Final = 4  # around the counted steps, and around each validation, which is not counted


def ledger_mismatch(record: Record) -> str | None:
    """How the recorded ledgers differ from the recorded predictions; None if equal, or without a ledger."""
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
    return None if record.predicted.equal else "the record says that its ledgers are not its predictions"


def _by_key(ledger: Sequence[LedgerRow]) -> dict[tuple[str, ...], tuple[int, int]]:
    return {
        (row.phase, row.purpose, row.unit, row.hop, row.link): (row.bytes, row.messages) for row in ledger
    }


def interface_mismatch(record: Record) -> str | None:
    """How recorded interfaces differ from the ledgers, where a node has both; None if they agree."""
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
    """How the bytes that an interface counted differ from ledger, packets' headers and at most
    ``CONTROL_BYTES`` a message of gloo's own; None if they do not.
    """
    low, high = INTERFACE_WITHIN
    stated, control = ledger + headers, CONTROL_BYTES * messages
    if low * stated <= counted <= high * stated + control:
        return None
    return (
        f"sent {counted} bytes in the timed steps, its ledger holds {ledger} and {headers} are the packets' "
        f"headers: {counted / stated if stated else math.nan:.3f} of what is stated, allowed is {low:g} to "
        f"{high:g}, and {control} bytes of gloo's own"
    )


@dataclass(slots=True)
class Checked:
    """What one rank checked while it trained."""

    kernel: str | None = None  # why a codec's kernels are not the reference; of the first such codec
    wrong: str | None = None  # this rank's first fault in training
    replayed: int = 0  # steps of the optimizer that were replayed
    linked: int = 0  # steps whose optimizer had the gradients of a rehearsal just before them
    batches: dict[int, str] = field(default_factory=dict)  # SHA-256 of inputs and targets, by step
    of_next_rank: dict[int, str] = field(default_factory=dict)  # the same of the next rank, by the seed
    seconds: float = 0.0  # from the first timed step to the last, without ``untimed``
    step_seconds: list[float] = field(default_factory=list)  # of every step, by a clock around it
    slept: list[float] = field(default_factory=list)  # seconds of them in which the thread slept, if known
    untimed: float = 0.0  # seconds between steps, so far


def training_fault(checked: Sequence[Checked], ranks: Sequence[RankRecord]) -> str | None:
    """Why training was not as the trial asks, by all ranks in order; None if nothing is wrong."""
    missed: list[str] = []
    for rank, check in enumerate(checked):
        if check.wrong is not None:
            return check.wrong
        drawn = checked[rank - 1].of_next_rank
        for step, digest in check.batches.items():
            if digest != drawn.get(step):
                read = f"rank {rank} read other batches in step {step} (SHA-256 {digest[:12]})"
                return f"{read} than its seed gives it ({drawn.get(step, 'none')[:12]})"
        steps = ranks[rank].steps
        for timed_step, seconds in zip(steps, check.step_seconds, strict=False):  # generations have no steps
            if timed_step.total > seconds + _ROUNDED:
                took = f"step {timed_step.index} of rank {rank} is said to take {timed_step.total:.3f} s"
                return f"{took}, by a clock around it {seconds:.3f} s: the clock counts too much"
        timed = [step.total for step in steps if not step.warmup]
        total, beside = math.fsum(timed), _BESIDE[0] + _BESIDE[1] * len(timed)
        sums = f"the timed steps of rank {rank} add up to {total:.3f} s, and {check.seconds:.3f} s passed"
        if timed and total < _COVERED * check.seconds - beside:
            missed.append(f"{sums}: the clock misses a part")
    if missed and len(missed) == len(checked):  # a busy machine may hold single ranks up between their steps
        return missed[0]
    for by_rank in zip(*(rank.steps for rank in ranks), strict=True):
        norms = [step.gradient_norm for step in by_rank if step.gradient_norm is not None]
        if norms and not max(norms) - min(norms) <= 1e-6 * abs(max(norms)) and math.isfinite(sum(norms)):
            listed = ", ".join(f"{norm:.6g}" for norm in norms)
            return f"gradient norms of step {by_rank[0].index} differ between ranks: {listed}"
    for rank, check in enumerate(checked):  # a rank that slept waited for messages most of that time
        exposed = [step.exposed for step in ranks[rank].steps if step.exposed is not None]
        waited, slept, count = math.fsum(exposed), math.fsum(check.slept), len(check.slept)
        if len(exposed) == count and waited < _AWAKE * slept - _BESIDE[0] - _BESIDE[1] * count:
            wait = f"waited {waited:.3f} s for messages in {count} steps"
            return f"rank {rank} is said to have {wait}, in which its thread slept for {slept:.3f} s"
    return None


def codec_mismatch(record: Record) -> str | None:
    """Why a message's codec is none of the trial's policy; None if all are."""
    if not record.communication_errors:
        return None
    policy = Trial.from_canonical(record.trial).resolved_policy()
    if policy is None:
        return None
    policies = [policy, policy.for_kind(persistent=True), policy.for_kind(trainable=False)]
    known = {str(codec) for variant in policies for codec in (*variant.codecs, variant.copy_codec)}
    unblocked = partial(re.sub, r":[0-9]+", "")  # a codec without the size of its blocks
    if policy.blocks == "shape":  # of each unit
        known |= {unblocked(text) for text in known}
    for error in record.communication_errors:
        if error.codec and not known & {error.codec, unblocked(error.codec)}:
            hop = "" if error.hop is None else f" in hop {error.hop}"
            sent = f"{error.purpose} of {error.unit or 'all units'} were sent as {error.codec}{hop}"
            return f"{sent} of step {error.step}; the trial's policy has {', '.join(sorted(known))}"
    return None


def header_bytes(row: LedgerRow) -> int:
    """Bytes of the headers of a row's messages, if equally long, in packets of ``SEGMENT_BYTES``."""
    return HEADER_BYTES * row.messages * math.ceil(row.bytes / max(row.messages, 1) / SEGMENT_BYTES)


def rate_mismatch(record: Record, *, above: bool = False) -> str | None:
    """How the probed link misses the requested rate, or only is ``above`` it; None where it does not."""
    link = record.link
    if link is None or link.requested_mbit is None or not link.probed_mbit:
        return None
    share = statistics.median(link.probed_mbit) / link.requested_mbit
    if share <= RATE_WITHIN[1] and (above or share >= RATE_WITHIN[0]):
        return None
    return f"its link carried {share:.1%} of {link.requested_mbit:g} Mbit/s"
