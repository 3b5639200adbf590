"""Records are checked for consistency from their own rows."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.records import record_checks
from harness.records.packet_sizes import HEADER_BYTES
from harness.records.record_checks import CONTROL_BYTES, INTERFACE_WITHIN, counter_mismatch
from harness.records.trial_record import CommunicationError, LedgerRow, Record
from harness.suites.trial import PolicyChanges, Trial
from tests.report.records import record_of


def halved(record: Record) -> Record:
    """Return ``record`` with half of every ledger's bytes, but with its flag unchanged."""
    ranks = [
        rank.model_copy(
            update={"ledger": [row.model_copy(update={"bytes": row.bytes // 2}) for row in rank.ledger or []]}
        )
        for rank in record.ranks
    ]
    return record.model_copy(update={"ranks": ranks})


@pytest.mark.parametrize("strategy", ["zero3", "zeropp"])
def test_a_halved_ledger_is_neither_the_prediction_nor_what_was_counted(strategy: str) -> None:
    """Both checks fail whatever the record's flag says, and their messages have the numbers."""
    made = record_of(Trial(strategy=strategy, steps=2, warmup=0))
    assert record_checks.ledger_mismatch(made) is None
    assert record_checks.interface_mismatch(made) is None
    wrong = halved(made)
    assert wrong.predicted is not None
    assert wrong.predicted.equal
    first = min(made.ranks[0].ledger or [], key=lambda r: (r.phase, r.purpose, r.unit, r.hop, r.link))
    mismatch = record_checks.ledger_mismatch(wrong) or ""
    assert f"rank 0 sent {first.bytes // 2} bytes in {first.messages} messages" in mismatch
    assert f"predicted are {first.bytes} bytes" in mismatch
    assert "where 0.99 to 1.02 times is allowed" in (record_checks.interface_mismatch(wrong) or "")


def test_prediction_and_ledger_of_other_ranks_differ() -> None:
    """Ledgers that are predicted for fewer ranks than ran are a mismatch."""
    made = record_of(Trial(strategy="zero3", steps=2, warmup=0))
    assert made.predicted is not None
    fewer = made.predicted.model_copy(update={"ledgers": made.predicted.ledgers[:-1]})
    mismatch = record_checks.ledger_mismatch(made.model_copy(update={"predicted": fewer}))
    assert mismatch == f"{len(made.ranks) - 1} ledgers are predicted for {len(made.ranks)} ranks"


def test_peers_have_nothing_to_be_checked_against() -> None:
    """Without a ledger neither check reports anything."""
    made = record_of(Trial(strategy="ddp", steps=2, warmup=0))
    assert made.interfaces
    assert record_checks.ledger_mismatch(made) is record_checks.interface_mismatch(made) is None


@given(
    ledger=st.integers(0, 10**12),
    packets=st.integers(0, 10**8),
    messages=st.integers(0, 10**6),
    share=st.floats(0, 3),
)
def test_what_an_interface_may_count(ledger: int, packets: int, messages: int, share: float) -> None:
    """An interface may count 0.99 to 1.02 of ledger and headers, plus gloo's own bytes."""
    headers, control = HEADER_BYTES * packets, CONTROL_BYTES * messages
    stated = ledger + headers
    counted = round(share * stated)
    wrong = counter_mismatch(counted, ledger, headers, messages)
    low, high = INTERFACE_WITHIN
    assert (wrong is None) == (low * stated <= counted <= high * stated + control)
    if wrong is not None:
        assert f"sent {counted} bytes" in wrong
        assert f"holds {ledger}, and packet headers take {headers}:" in wrong


@given(share=st.floats(0.5, 2))
@example(share=1.25)
def test_a_link_of_another_rate_is_marked(share: float) -> None:
    """A rate that is more than 5 % off is reported with its share; one that is too fast fails the trial, since no
    link can speed up messages.
    """
    made = record_of(Trial(strategy="zero3", steps=2, warmup=0))
    assert made.link is not None
    probed = made.link.model_copy(update={"requested_mbit": 100.0, "probed_mbit": [100 * share] * 2})
    linked = made.model_copy(update={"link": probed})
    mismatch = record_checks.rate_mismatch(linked)
    assert record_checks.rate_mismatch(linked, above=True) == (mismatch if share > 1 else None)
    if 0.951 < share < 1.049:
        assert mismatch is None
    elif not 0.949 < share < 1.051:
        assert mismatch == f"the link carried {share:.1%} of 100 Mbit/s"


def test_weights_that_cross_nodes_in_backward_are_named_by_hpz_s_law() -> None:
    """With hpZ no weights cross between nodes in backward passes, even if the prediction has them; others may."""
    made = record_of(Trial(strategy="hpz", steps=2, warmup=0))
    assert record_checks.secondary_mismatch(made) is None
    crossed = row(4096, 2).model_copy(update={"phase": "backward"})
    ranks = [rank.model_copy(update={"ledger": [*(rank.ledger or []), crossed]}) for rank in made.ranks]
    wrong = made.model_copy(update={"ranks": ranks})
    assert "rank 0 sent 4096 bytes of weights to other nodes" in (
        record_checks.secondary_mismatch(wrong) or ""
    )
    plain = record_of(Trial(strategy="zero3", steps=2, warmup=0))
    assert record_checks.secondary_mismatch(plain) is None


@given(first=st.floats(1, 9), last=st.floats(1, 9))
@example(first=2.0, last=2.0)
def test_a_loss_that_does_not_fall_is_marked(first: float, last: float) -> None:
    """After 100 steps, the mean loss of the last tenth must be below that of the first; before, nothing is said."""
    made = record_of(Trial(strategy="zero3", steps=100, warmup=0))
    steps = [
        step.model_copy(update={"loss": first if step.index < 50 else last}) for step in made.ranks[0].steps
    ]
    ranks = [rank.model_copy(update={"steps": steps}) for rank in made.ranks]
    marked = record_checks.flat_loss(made.model_copy(update={"ranks": ranks}))
    assert marked == (None if last < first else f"its training loss went from {first:.4f} to {last:.4f}")
    fewer = [rank.model_copy(update={"steps": steps[1:]}) for rank in ranks]
    assert record_checks.flat_loss(made.model_copy(update={"ranks": fewer})) is None


def row(nbytes: int, messages: int) -> LedgerRow:
    return LedgerRow(
        phase="forward", purpose="weights", unit="", hop="node", link="inter", bytes=nbytes, messages=messages
    )


@given(st.sampled_from(["int8:256:clip", "int8:128", "int4:2048", "fp32"]))
def test_a_codec_that_the_trial_has_not_is_named(codec: str) -> None:
    """Every message must have a codec of the policy; the codec of small, persistent parameters is one of them."""
    made = record_of(
        Trial(strategy="zeropp", policy=PolicyChanges(weights="int8:2048", gradients="int4:256"))
    )
    error = CommunicationError(step=0, purpose="gradients", unit="b", hop=1, codec="int4:256",
                               squared_error=1.0, squared_value=1.0)  # fmt: skip
    right = made.model_copy(update={"communication_errors": [error]})
    wrong = right.model_copy(update={"communication_errors": [error.model_copy(update={"codec": codec})]})
    assert record_checks.codec_mismatch(right) is None
    mismatch = record_checks.codec_mismatch(wrong)
    assert codec == "fp32" or (mismatch is not None and f"sent as {codec} in hop 1" in mismatch)


@given(nbytes=st.integers(0, 10**7), messages=st.integers(1, 50))
def test_headers_of_a_real_network(nbytes: int, messages: int) -> None:
    """Equal messages have one header for each 1,448 bytes or part of them; without messages there is none."""
    packets = sum(1 for _ in range(0, nbytes, 1448))
    assert record_checks.header_bytes(row(nbytes * messages, messages)) == 66 * packets * messages
    assert record_checks.header_bytes(row(0, 0)) == 0
