"""What a loss like the baseline's costs in bytes and brings in seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from harness.records.trial_record import CommunicationError, Record
from tests.report.heads import SEEDS, head_of, trained, validated
from tests.report.records import changed


def test_the_fewest_bytes_for_a_loss_like_the_baselines_are_named_with_the_net_speed_up() -> None:
    """Where enough configurations have a loss; without a loss like the baseline's, those within the margin count."""
    codecs = [f"int{bits}:{block}" for bits in (3, 4, 6, 8) for block in (64, 128)]
    above = {codec: 0.0 if codec[3] in "68" else 0.3 for codec in codecs}
    text = head_of(validated({"": 0.0, **above}), answer="loss").sentence
    assert re.search(
        r" Of the 4 configurations whose validation loss is not significantly higher than that of ZeRO-3, qgZ "
        r"\(gradients int6:128\) sends the fewest bytes between nodes: 0\.\d+ of ZeRO-3's\. The net speed-up of qgZ "
        r"\(gradients int6:128\) over ZeRO-3 is 1\.\d\d \(95 % CI .*\)\.",
        text,
    ), text
    above = {codec: 0.01 if codec == "int3:64" else 0.3 for codec in codecs}
    text = head_of(validated({"": 0.0, **above}), answer="loss").sentence
    assert re.search(
        r" The one configuration whose validation loss is higher than that of ZeRO-3 within the margin, qgZ "
        r"\(gradients int3:64\), sends 0\.\d+ of ZeRO-3's bytes between nodes\.",
        text,
    ), text
    assert "net speed-up" not in text
    few = head_of(validated({"": 0.0, "int4:64": 0.0}), answer="loss").sentence
    assert " configurations whose" not in few


FIELDS: dict[str, tuple[float, float, str, str]] = {
    # nats that weights and gradients cost, and what follows the first sentence
    "equal and higher within the margin": (
        0.0, 0.01, "that is not significantly higher", "that is higher within the margin",
    ),
    "lower and beyond the margin": (-0.3, 0.3, "that is not significantly higher", ""),
}  # fmt: skip


@pytest.mark.parametrize(("weights", "gradients", "of_weights", "of_gradients"), FIELDS.values(), ids=FIELDS)
def test_each_field_that_several_configurations_change_has_its_own_fewest_bytes(
    weights: float, gradients: float, of_weights: str, of_gradients: str
) -> None:
    """If there are several such fields; a field whose losses are all beyond the margin has no sentence."""
    codecs = [f"int{bits}:256" for bits in (2, 3, 4, 6)]
    records = trained(
        [
            ("zero3", {}, 0.0),
            *(("qwz", {"weights": codec}, weights) for codec in codecs),
            *(("qgz", {"gradients": codec}, gradients) for codec in codecs),
        ]
    )
    text = head_of(records, answer="loss").sentence
    for field, name, how in (("weights", "qwZ", of_weights), ("gradients", "qgZ", of_gradients)):
        subject = f"{name} ({field} int2:256)"
        beginning = f"Of the 4 configurations that change only {field}, {subject} sends the fewest bytes"
        assert (beginning in text) is bool(how)
        if how:
            ending = rf" for a loss {how}: 0\.\d+ of ZeRO-3's bytes between nodes\."
            assert re.search(re.escape(beginning) + ending, text), text


EQUAL = {
    "all": ((0.3, 0.1, 0.3), "all others end significantly higher"),
    "some": ((0.3, 0.1, 0.1), "1 of the 2 others end significantly higher"),
    "none": ((0.1, 0.1, 0.1), "no other ends significantly higher"),
}


@pytest.mark.parametrize(("above", "others"), EQUAL.values(), ids=EQUAL)
def test_of_equal_bytes_the_lowest_loss_is_named(above: tuple[float, float, float], others: str) -> None:
    """With the number of the others whose losses, paired by seed, are higher."""
    codecs = ("int4:128", "int4:128:clip", "int4:128:stochastic")
    configured = [("qgz", {"gradients": codec}, worse) for codec, worse in zip(codecs, above, strict=True)]
    text = head_of(trained([("zero3", {}, 0.0), *configured]), answer="loss").sentence
    assert re.search(
        r" Of the 3 configurations that send 0\.\d+ of ZeRO-3's bytes, qgZ \(gradients int4:128.*\) ends with the "
        rf"lowest validation loss; {others}\.",
        text,
    ), text
    two = head_of(trained([("zero3", {}, 0.0), *configured[:2]]), answer="loss").sentence
    assert "lowest validation loss" not in two


LIBRARIES = {
    "higher": (0.2, r" DDP's validation loss is 0\.200 nats higher than ZeRO-3's \(.*, 6 seeds\); DDP sends fp32\."),
    "lower": (-0.2, r" DDP's validation loss is 0\.200 nats lower than ZeRO-3's \(.*\); DDP sends fp32\."),
    "equal": (0.0, r" DDP's validation loss is 0\.0000 nats .* \(.*\), not significant; DDP sends fp32\."),
}  # fmt: skip


@pytest.mark.parametrize(("above", "text"), LIBRARIES.values(), ids=LIBRARIES)
def test_the_loss_of_the_one_library_has_a_sentence(above: float, text: str) -> None:
    """Unless the first sentence is about it."""
    records = trained([("zero3", {}, 0.0), ("ddp", {}, above), ("zeropp", {}, 0.4)])
    sentence = head_of(records, answer="loss").sentence
    assert re.search(text, sentence), sentence
    alone = head_of(trained([("zero3", {}, 0.0), ("ddp", {}, 0.3)]), answer="loss").sentence
    assert alone.count("DDP's validation loss") == 1


def test_errors_that_were_measured_beside_losses_have_a_sentence() -> None:
    """That of the first sentence's configuration; without errors there is none."""
    records = validated({"": 0.0, "int4:64": 0.3})
    assert len(records) == 2 * len(SEEDS)
    text = head_of(_with_errors(records), answer="loss").sentence
    assert text.endswith(" The gradient error (vNMSE) of qgZ (gradients int4:64) is 0.0200.")
    assert "error" not in head_of(records, answer="loss").sentence


def _with_errors(records: Sequence[Record]) -> list[Record]:
    error = CommunicationError(
        step=0, purpose="gradients", unit="", squared_error=0.02, squared_value=1.0, cosine=0.5
    )
    return [changed(record, communication_errors=[error]) for record in records]


@pytest.mark.parametrize("count", [2, 3])
def test_the_error_of_one_configuration_says_nothing_on_several_fields(count: int) -> None:
    """Where several fields are each changed alone by three configurations, no sentence is on errors."""
    codecs = [f"int{bits}:256" for bits in (2, 3, 4)]
    records = trained(
        [
            ("zero3", {}, 0.0),
            *(("qwz", {"weights": codec}, 0.1) for codec in codecs[:count]),
            *(("qgz", {"gradients": codec}, 0.3) for codec in codecs),
        ]
    )
    text = head_of(_with_errors(records), answer="loss").sentence
    assert ("gradient error" in text) is (count == 2), text
