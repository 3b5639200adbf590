"""Batches as NumPy arrays, for each form of data that a model reads.  No torch.

``next``: text and the next byte at each position; ``masked``: masked text; ``images``: rendered
characters and their classes.  The model decides: a BERT reads masked text, a vision transformer
images, and everything else text; a user's ``module:function`` reads images where the trial's corpus
is ``glyphs``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from harness.errors import CorpusError
from harness.suites.model_sizes import IMAGE_SIDE, PRESETS, BERTShape, ViTShape
from harness.suites.trial import Trial
from harness.workloads import corpus
from harness.workloads import glyph_images as glyphs
from harness.workloads.corpus import Corpus
from harness.workloads.glyph_images import GLYPHS, Glyphs
from harness.workloads.masked_text import masked

Pair = tuple[NDArray[Any], NDArray[np.int64]]  # what a model reads, and what it is to answer

_BYTES: Final = 256
_TOKEN_BYTES: Final = 2 * 8  # int64; windows are drawn whole, then cut
_IMAGE_BYTES: Final = 2 * 4 * IMAGE_SIDE**2  # float32; drawn, then copied to where tensors live


class Samples(Protocol):
    """Protocol of a data set that yields batches."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the whole data set."""

    def batch(self, *, seed: int, step: int, micro_batch: int, rank: int, sequences: int) -> Pair:
        """One micro-batch of one rank, which depends on the arguments alone."""

    def validation_batches(self, *, batches: int, rank: int, world: int, sequences: int) -> list[Pair]:
        """Batches of one rank from the validation split."""


@dataclass(frozen=True, slots=True)
class NextByte:
    """Next-byte prediction: (B, T) int64 bytes, and (B, T) int64 the byte after each."""

    corpus: Corpus
    length: int

    @property
    def sha256(self) -> str:
        """Of the corpus."""
        return self.corpus.sha256

    def batch(self, *, seed: int, step: int, micro_batch: int, rank: int, sequences: int) -> Pair:
        """See :class:`Samples`."""
        windows = self.corpus.batch(
            seed=seed, step=step, micro_batch=micro_batch, rank=rank, sequences=sequences, length=self.length
        )
        return windows[:, :-1], windows[:, 1:]

    def validation_batches(self, *, batches: int, rank: int, world: int, sequences: int) -> list[Pair]:
        """See :class:`Samples`."""
        windows = self.corpus.validation_batches(
            batches=batches, rank=rank, world=world, sequences=sequences, length=self.length
        )
        return [(batch[:, :-1], batch[:, 1:]) for batch in windows]


@dataclass(frozen=True, slots=True)
class MaskedText:
    """Masked text: (B, T) int64 tokens and (B, T) int64 targets, from :func:`masked_text.masked`."""

    corpus: Corpus
    length: int

    @property
    def sha256(self) -> str:
        """Of the corpus."""
        return self.corpus.sha256

    def batch(self, *, seed: int, step: int, micro_batch: int, rank: int, sequences: int) -> Pair:
        """See :class:`Samples`."""
        windows = self.corpus.batch(
            seed=seed, step=step, micro_batch=micro_batch, rank=rank, sequences=sequences, length=self.length
        )
        keys = [f"{seed}/{step}/{micro_batch}/{rank}/{index}" for index in range(sequences)]
        return masked(windows[:, :-1], keys, _BYTES)

    def validation_batches(self, *, batches: int, rank: int, world: int, sequences: int) -> list[Pair]:
        """See :class:`Samples`."""
        windows = self.corpus.validation_batches(
            batches=batches, rank=rank, world=world, sequences=sequences, length=self.length
        )
        found = []
        for number, batch in enumerate(windows):
            first = (number * world + rank) * sequences
            keys = [f"validation/{first + index}" for index in range(sequences)]
            found.append(masked(batch[:, :-1], keys, _BYTES))
        return found


def load(trial: Trial) -> NextByte | MaskedText | Glyphs:
    """Load the data in the form that the trial's model reads.

    Raises:
        CorpusError: naming the corpus, if it cannot be read or is too small.
    """
    if trial.corpus == GLYPHS:
        return glyphs.load()
    text = corpus.load(trial.corpus)
    masks = isinstance(PRESETS.get(trial.model.name), BERTShape)
    return MaskedText(text, trial.sequence) if masks else NextByte(text, trial.sequence)


def check(trial: Trial) -> None:
    """Refuse data that is missing, too small, or does not fit the model.

    Raises:
        CorpusError: naming it and the numbers.
    """
    shape, name = PRESETS.get(trial.model.name), trial.model.name
    if isinstance(shape, ViTShape) and trial.corpus != GLYPHS:
        raise CorpusError(f"corpus {trial.corpus!r}: model {name!r} reads images; expected {GLYPHS!r}")
    if trial.corpus != GLYPHS:
        corpus.check(trial.corpus, trial.sequence)
    elif shape is not None and not isinstance(shape, ViTShape):
        raise CorpusError(f"corpus {GLYPHS!r}: images, and model {name!r} reads text; expected a text")


def micro_batch_bytes(trial: Trial) -> int:
    """Bytes of memory that one micro-batch of one rank takes while it is made."""
    if trial.corpus == GLYPHS:
        return trial.tokens_per_rank // trial.sequence * _IMAGE_BYTES
    return 2 * _TOKEN_BYTES * trial.tokens_per_rank
