"""Checks that the numbers of one record agree with each other, and with the trial's settings.  No torch.

Each check returns a sentence on the first number that does not agree.  If all numbers agree, it returns None.

- :func:`ledger_mismatch`: the bytes and messages that ranks counted when they sent them (the ledgers) equal the
  predictions; with a schedule, the bytes of each single step do too.
- :func:`interface_mismatch`: the nodes' network interfaces counted the bytes that the ledgers and packet headers
  explain.
- :func:`rate_mismatch`: the link had the requested rate.
- :func:`codec_mismatch`: messages were encoded with the codecs of the trial's policy.
- :func:`flat_loss`: the training loss fell.
- :func:`secondary_mismatch`: with hpZ inside a node, backward passes gathered no weights from other nodes.

The harness fails a trial that does not pass a check, except for two faults: a link that was too slow, and a training
loss that did not fall.  Reports mark trials with these two faults.  The records of a report may be old.  Reports
therefore apply all checks again, except for :func:`codec_mismatch`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Final

from harness.records import sent_by_step
from harness.records.packet_sizes import HEADER_BYTES, SEGMENT_BYTES
from harness.records.trial_record import LedgerRow, Record
from harness.suites.trial import Trial
from impl.policy.policy import Policy

# Bytes that an interface may count, as a share of the ledger's bytes plus headers.
INTERFACE_WITHIN: Final = (0.99, 1.02)
# Bytes that gloo itself may send with one of our messages.  A ring sends a message in two parts, and gloo sends two
# announcements and a header with each part; each of these three takes 48 bytes.
CONTROL_BYTES: Final = 2 * 3 * 48
RATE_WITHIN: Final = (0.95, 1.05)  # rate that probes may measure, as a share of the requested rate
# In a trial of at least so many steps, warm-up included, the training loss must fall.
_LEARNS: Final = 100
# Number of barriers around the timed steps, whose messages the interface counts.  There are as many barriers around
# each validation; the interface's counts do not include the validation itself.
_BARRIERS: Final = 4


def ledger_mismatch(record: Record) -> str | None:
    """Return a sentence on the first difference between the recorded ledgers and the predicted ledgers.

    A ledger lists the bytes and messages that one rank sent in the timed steps.  Returns None if there is no
    difference, or if the record has no predictions.

    Messages whose purpose is in ``predicted.unpredicted`` could not be predicted, and are not compared.  If all
    messages were predicted and the trial has a schedule, the bytes of each single step are compared too.

    Last, the field ``predicted.equal``, in which the trial stored its own result of this comparison, is checked.  It
    must be True if all messages were predicted, and None if some were not.
    """
    if record.predicted is None:
        return None
    predicted, measured = record.predicted.ledgers, record.predicted.unpredicted
    if len(predicted) != len(record.ranks):
        return f"{len(predicted)} ledgers are predicted for {len(record.ranks)} ranks"
    for rank, ledger in zip(record.ranks, predicted, strict=True):
        booked, expected = (
            _by_key([row for row in rows if row.purpose not in measured])
            for rows in (rank.ledger or [], ledger)
        )
        for key in sorted(booked.keys() | expected.keys()):
            sent, wanted = booked.get(key, (0, 0)), expected.get(key, (0, 0))
            if sent != wanted:
                row = f"{sent[0]} bytes in {sent[1]} messages for {', '.join(filter(None, key))}"
                prediction = f"predicted are {wanted[0]} bytes in {wanted[1]} messages"
                return f"rank {rank.rank} sent {row}; {prediction}"
    if not measured and (why := sent_by_step.mismatch(record)) is not None:
        return why
    if measured and record.predicted.equal is not None:
        return f"the record states whether ledgers equal predictions, but bytes of {measured[0]} were not predicted"
    stated = record.predicted.equal or bool(measured)
    return None if stated else "the record states that its ledgers differ from its predictions"


def _by_key(ledger: Sequence[LedgerRow]) -> dict[tuple[str, ...], tuple[int, int]]:
    """Convert a ledger's rows into a dict from (phase, purpose, unit, hop, link) to (bytes, messages)."""
    return {
        (row.phase, row.purpose, row.unit, row.hop, row.link): (row.bytes, row.messages) for row in ledger
    }


def interface_mismatch(record: Record) -> str | None:
    """Return a sentence on the first node whose network interface sent more or fewer bytes than its ranks explain.

    The interface has to send the bytes that the node's ranks send to other nodes, and the headers of its packets.  The
    ranks' bytes are taken from their ledgers (lists of the bytes that a rank sent).  :func:`counter_mismatch` has the
    tolerance.  A node is not compared if its interface was not counted, or if one of its ranks has no ledger.  Returns
    None if all compared nodes agree.
    """
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
    """Return a sentence if a node's network interface sent more or fewer bytes than its ranks' messages explain.

    The interface must have sent at least 0.99 times the sum of ``ledger`` and ``headers``.  It may have sent at most
    1.02 times this sum (:data:`INTERFACE_WITHIN`), plus :data:`CONTROL_BYTES` for each message, since gloo sends
    messages of its own.  Returns None if the bytes are within these limits.

    Args:
        counted: Bytes that the interface sent.
        ledger: Bytes that the node's ranks sent to other nodes, as the ranks counted them.
        headers: Bytes of the packets' headers.
        messages: Number of messages that the node's ranks sent to other nodes, those of barriers included.
    """
    low, high = INTERFACE_WITHIN
    stated, control = ledger + headers, CONTROL_BYTES * messages
    if low * stated <= counted <= high * stated + control:
        return None
    return (
        f"sent {counted} bytes in the timed steps; its ledger holds {ledger}, and packet headers take {headers}: "
        f"it sent {counted / stated if stated else math.nan:.3f} times their sum, where {low:g} to {high:g} times is "
        f"allowed, plus {control} bytes of gloo's own messages"
    )


def codec_mismatch(record: Record) -> str | None:
    """Return a sentence on the first message that was encoded with a codec that the trial's policy does not use.

    Only messages whose errors were measured are checked.  Returns None if there is no such message.
    """
    if not record.communication_errors:
        return None
    policy = Trial.from_canonical(record.trial).resolved_policy()
    if policy is None:
        return None
    # ``known`` has the names of the codecs of each phase, and ``unblocked`` removes the size of the blocks from a name:
    # ``int8:2048`` becomes ``int8``.
    known, unblocked = (dict[int, set[str]](), partial(re.sub, r":[0-9]+", ""))
    for error in record.communication_errors:
        phase = policy.phase_at(error.step)
        if phase not in known:
            known[phase] = _codecs_of(policy.phases[phase])
        if error.codec and not known[phase] & {error.codec, unblocked(error.codec)}:
            hop = "" if error.hop is None else f" in hop {error.hop}"
            sent = f"{error.purpose} of {error.unit or 'all units'} were sent as {error.codec}{hop}"
            return f"in step {error.step} {sent}; the trial's policy has {', '.join(sorted(known[phase]))}"
    return None


def _codecs_of(policy: Policy) -> set[str]:
    """Return the names, such as ``int8:2048``, of all codecs in which messages of a policy may be encoded.

    ``policy`` must have no schedule.
    """
    policies = [policy, policy.for_kind(persistent=True), policy.for_kind(trainable=False)]
    known = {str(codec) for variant in policies for codec in (*variant.codecs, variant.copy_codec)}
    if policy.blocks == "shape":  # the size of blocks then differs from unit to unit
        known |= {re.sub(r":[0-9]+", "", text) for text in known}
    return known


def secondary_mismatch(record: Record) -> str | None:
    """Return a sentence if backward passes gathered weights from other nodes although hpZ keeps a copy in each node.

    Returns None if backward passes gathered no weights from other nodes.  Also returns None in these cases:

    - the trial has no policy;
    - FSDP2 or DDP runs the policy;
    - in one of the policies of the trial's schedule, hpZ keeps no such copy in each node.

    The check compares the ledger (the bytes that each rank sent) with the trial's settings, not with the predicted
    messages.  It therefore finds the fault even if the prediction has the same fault.
    """
    if not record.trial or not record.ranks:
        return None
    trial = Trial.from_canonical(record.trial)
    policy, per_node = trial.resolved_policy(), trial.cluster.ranks_per_node
    if policy is None or trial.host is not None:
        return None
    for phase in policy.phases:
        if phase.secondary == 0 or (phase.secondary != "node" and phase.secondary > per_node):
            return None
    for rank in record.ranks:
        rows = [row for row in rank.ledger or [] if (row.phase, row.link) == ("backward", "inter")]
        if nbytes := sum(row.bytes for row in rows if row.purpose in ("weights", "persistent")):
            return (
                f"rank {rank.rank} sent {nbytes} bytes of weights to other nodes in backward passes, although "
                "hpZ keeps a copy of all weights in each node"
            )
    return None


def flat_loss(record: Record) -> str | None:
    """Return a sentence if the mean loss of the last tenth of steps is not below the mean loss of the first tenth.

    Returns None if it is below.  Returns None too if the trial does not train, or has fewer than 100 steps.  Warm-up
    steps are included.

    A report marks a trial whose loss did not fall.  The trial still has a result, because a configuration may fail to
    learn.
    """
    losses = [
        math.fsum(step.loss for step in steps) for steps in zip(*(r.steps for r in record.ranks), strict=True)
    ]
    if len(losses) < _LEARNS or record.trial.get("workload", "train") != "train":
        return None
    tenth, ranks = len(losses) // 10, len(record.ranks)
    first, last = (math.fsum(part) / tenth / ranks for part in (losses[:tenth], losses[-tenth:]))
    return None if last < first else f"its training loss went from {first:.4f} to {last:.4f}"


def header_bytes(row: LedgerRow) -> int:
    """Return the bytes of the packet headers of all messages that one row of a ledger counts.

    A row counts the bytes and messages that a rank sent for one purpose.  All messages are assumed to be equally long,
    and to be sent in packets with ``SEGMENT_BYTES`` of payload.
    """
    return HEADER_BYTES * row.messages * math.ceil(row.bytes / max(row.messages, 1) / SEGMENT_BYTES)


def rate_mismatch(record: Record, *, above: bool = False) -> str | None:
    """Return a sentence if the median of the link's probes misses the requested rate by more than 5 %; else None.

    A probe measures the rate of the link between nodes after the trial.  Returns None too if no rate was requested, or
    if the link was not probed.

    Args:
        record: The record.
        above: Whether to report only a link that is too fast, and not a link that is too slow.
    """
    link = record.link
    if link is None or link.requested_mbit is None or not link.probed_mbit:
        return None
    share = statistics.median(link.probed_mbit) / link.requested_mbit
    if share <= RATE_WITHIN[1] and (above or share >= RATE_WITHIN[0]):
        return None
    return f"the link carried {share:.1%} of {link.requested_mbit:g} Mbit/s"
