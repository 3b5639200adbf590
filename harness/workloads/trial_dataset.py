"""Loads and checks the data set of a trial, in the form that the trial's model reads.  Does not import torch."""

from __future__ import annotations

from typing import Final

from harness.errors import CorpusError
from harness.suites.model_sizes import IMAGE_SIDE, PRESETS, BERTShape, ViTShape
from harness.suites.trial import Trial
from harness.workloads import corpus, glyph_images
from harness.workloads.dataset import Dataset
from harness.workloads.glyph_images import GLYPHS
from harness.workloads.own_pairs import OwnPairs

_TOKEN_BYTES: Final = 2 * 8  # two int64 for each token: an input and a target
_IMAGE_BYTES: Final = 2 * 4 * IMAGE_SIDE**2  # two images in float32: as drawn, and the copy on the device


def load(trial: Trial) -> Dataset:
    """Load a trial's data set.

    Raises:
        CorpusError: if the corpus cannot be read, is too small, or is of a kind that the model does not read.
    """
    if trial.corpus == GLYPHS:
        return glyph_images.load()
    shape = PRESETS.get(trial.model.name)
    vocab = trial.model.arguments.get("vocab", getattr(shape, "vocab", None))
    loaded = corpus.load(trial.corpus, trial.tokenizer)
    if not isinstance(loaded, OwnPairs):
        masks = isinstance(shape, BERTShape)
        vocab = vocab if isinstance(vocab, int) else None
        return corpus.Text(loaded, trial.sequence, vocab=vocab, masks=masks)
    if shape is not None:
        reads = f"returns pairs of arrays, and the preset {trial.model.name!r} reads tokens or glyphs"
        wanted = "set model.name to a 'module:function' that reads them"
        raise CorpusError(f"corpus {trial.corpus!r}: {reads}; {wanted}")
    return loaded


def check(trial: Trial) -> None:
    """Raise a CorpusError if a trial's corpus is missing, too small, or of a kind that the model does not read.

    If the corpus is a text and the trial has no tokenizer, only the sizes of the files are read, not their contents.
    """
    shape, name = PRESETS.get(trial.model.name), trial.model.name
    reads, expected = ("images", repr(GLYPHS)) if isinstance(shape, ViTShape) else ("text", "a text")
    if shape is not None and (trial.corpus == GLYPHS) != (reads == "images"):
        raise CorpusError(
            f"corpus {trial.corpus!r} does not fit model {name!r}, which reads {reads}; expected {expected}"
        )
    if trial.corpus == GLYPHS:
        if trial.tokenizer is not None:
            raise CorpusError(
                f"corpus {GLYPHS!r} consists of images, which need no tokenizer; remove tokenizer"
            )
    elif corpus.holds_arrays(trial.corpus) or trial.tokenizer is not None:
        load(trial)
    else:
        corpus.check(trial.corpus, trial.sequence)


def micro_batch_bytes(trial: Trial) -> int:
    """Return the most bytes of memory that the inputs and targets of one micro-batch take on a rank.

    Inputs and targets are counted twice: as the data set returns them, and as their copy on the model's device.  If the
    corpus cannot be read, it is assumed to be a text.
    """
    examples = trial.tokens_per_rank // trial.sequence
    if trial.corpus == GLYPHS:
        return examples * _IMAGE_BYTES
    try:
        loaded = corpus.load(trial.corpus) if corpus.holds_arrays(trial.corpus) else None
    except CorpusError:
        loaded = None
    if isinstance(loaded, OwnPairs):
        return 2 * examples * loaded.example_bytes  # drawn, then copied to the device
    return 2 * _TOKEN_BYTES * trial.tokens_per_rank
