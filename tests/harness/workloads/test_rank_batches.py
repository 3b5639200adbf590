"""Data in the form that a model reads."""

from __future__ import annotations

import pytest
import torch

from harness.errors import CorpusError
from harness.suites.trial import Model, Trial
from harness.workloads import trial_dataset
from harness.workloads.corpus import Text
from harness.workloads.masked_text import NO_TARGET
from harness.workloads.models import build
from harness.workloads.rank_batches import RankBatches

IMAGES = {"corpus": "glyphs", "sequence": 64}


def trial(name: str, **changes: object) -> Trial:
    usual = {"model": {"name": name}, "tokens_per_rank": 256}
    return Trial.model_validate(usual | (IMAGES if name.startswith("vit") else {}) | changes)


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "vit-tiny"])
def test_single_has_all_ranks_batches(name: str) -> None:
    """One process draws for every rank what the ranks draw, in training and in validation."""
    fields = {"validate_every": 0, "validation_batches": 2, "accumulation": 2}
    whole = RankBatches(trial(name, strategy="single", **fields), 0, torch.device("cpu"))
    ranks = [RankBatches(trial(name, **fields), rank, torch.device("cpu")) for rank in range(4)]
    assert len(whole.ranks) == 4
    for micro, parts in zip(whole.step(3), zip(*(data.step(3) for data in ranks), strict=True), strict=True):
        for (read, answer), (part,) in zip(micro, parts, strict=True):
            assert torch.equal(read, part[0])
            assert torch.equal(answer, part[1])
    dealt = [pair for data in ranks for pair in data.validation]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole.validation, dealt, strict=True))


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "vit-tiny"])
def test_a_model_reads_its_data(name: str) -> None:
    """Every preset computes a loss near a uniform guess on its own form of data."""
    preset = trial(name)
    ((batch,),) = RankBatches(preset, 0, torch.device("cpu")).step(0)
    torch.manual_seed(0)
    loss = build(preset.model, preset.sequence)(*batch).item()
    assert abs(loss - {"g": 5.545, "b": 5.545, "v": 5.545}[name[0]]) < 0.4


def test_masked_text_is_of_the_corpus() -> None:
    """A BERT's targets are the bytes that a GPT reads in the same place."""
    pairs = [
        next(RankBatches(trial(name), 1, torch.device("cpu")).step(5))[0]
        for name in ("gpt-tiny", "bert-tiny")
    ]
    (text, _), (_, targets) = pairs
    masked = targets != NO_TARGET
    assert torch.equal(targets[masked], text[masked])


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        (
            trial("gpt-tiny", corpus="glyphs"),
            "does not fit model 'gpt-tiny', which reads text; expected a text",
        ),
        (
            trial("vit-tiny", corpus="stdlib"),
            "does not fit model 'vit-tiny', which reads images; expected 'glyphs'",
        ),
    ],
)
def test_another_form_is_refused(unfit: Trial, message: str) -> None:
    """Text for a model of images, or images for a model of text, is refused in one line."""
    with pytest.raises(CorpusError, match=message):
        trial_dataset.check(unfit)


def test_a_users_model_reads_what_the_corpus_is() -> None:
    """``module:function`` gets text, and images where its corpus is the images."""
    text = trial_dataset.load(Trial(model=Model(name="a:b")))
    assert isinstance(text, Text)
    assert not text.masks
    images, _ = trial_dataset.load(Trial(model=Model(name="a:b"), corpus="glyphs")).batch(
        seed=0, step=0, micro_batch=0, rank=0, sequences=2
    )
    assert images.shape == (2, 32, 32)
