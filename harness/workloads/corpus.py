"""Text corpora: the bytes that language models train on, and the batches drawn from them.

A corpus is the interpreter's own standard library sources (``stdlib``), or any file, or all files
of a folder, joined in alphabetical order.  The first 95 % of its bytes are for training, the rest
for validation.  Which bytes make a batch follows from (seed, step, micro-batch, rank) alone, so
every policy and every peer gets the same batches.  Bytes are the tokens; there is no tokenizer.
No torch.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from harness.errors import CorpusError
from harness.workloads.masked_text import masked
from harness.workloads.sampling import Pair, Samples

STDLIB: Final = "stdlib"
TRAINING_SHARE: Final = 0.95
LARGEST_BYTES: Final = 2 << 30  # a corpus is held in memory by every rank
BYTES: Final = 256  # values of a token


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text, split into training and validation bytes.

    Attributes:
        source: its name in the suite.
        sha256: of all bytes, training first.
        train: (bytes,) uint8.
        validation: (bytes,) uint8.
    """

    source: str
    sha256: str
    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]


class Text(Samples):
    """Windows of a corpus: (B, T) int64 bytes, and (B, T) int64 the byte after each or, of masked text,
    what :func:`harness.workloads.masked_text.masked` makes of them.

    Raises:
        CorpusError: if the validation bytes, of which there are fewer, do not hold one window.
    """

    def __init__(self, corpus: Corpus, length: int, *, masks: bool = False) -> None:
        _check_room(corpus.source, len(corpus.validation), length)
        self.sha256, self.train, self.validation = corpus.sha256, corpus.train, corpus.validation
        self.length, self.masks = length, masks

    def count(self, part: NDArray[np.uint8]) -> int:
        """Number of offsets at which a window of T + 1 bytes can start."""
        return len(part) - self.length

    def at(self, part: NDArray[np.uint8], numbers: list[int], keys: list[str]) -> Pair:
        """The windows that start at these offsets; ``keys`` decide what is masked."""
        offsets = np.asarray(numbers)[:, None] + np.arange(self.length + 1)
        windows = part[offsets].astype(np.int64)
        return masked(windows[:, :-1], keys, BYTES) if self.masks else (windows[:, :-1], windows[:, 1:])


def _check_room(source: str, size: int, length: int) -> None:
    """Refuse validation bytes that do not hold one window of ``length + 1``."""
    if size <= length:
        raise CorpusError(
            f"corpus {source!r}: its {size} validation bytes do not hold one sequence of {length} tokens "
            f"and its last target; a text of at least {int((length + 1) / (1 - TRAINING_SHARE)) + 1} "
            "bytes does"
        )


def _files_of(source: str) -> tuple[list[Path], int]:
    """The files that make up ``source`` in the order in which they are joined, and the bytes of the whole.

    Raises:
        CorpusError: if there are none, or more bytes than :data:`LARGEST_BYTES`.
    """
    folder = Path(sysconfig.get_path("stdlib") if source == STDLIB else source)
    if folder.is_file():
        files = [folder]
    elif folder.is_dir():
        found = folder.glob("*.py") if source == STDLIB else folder.rglob("*")
        files = sorted(path for path in found if path.is_file())
    else:
        raise CorpusError(
            f"corpus {source!r}: no such file or folder; expected one, or {STDLIB!r} for the "
            "sources of Python's standard library"
        )
    if not files:
        raise CorpusError(f"corpus {source!r}: no files in it")
    try:
        size = sum(path.stat().st_size for path in files)
    except OSError as error:
        raise CorpusError(f"corpus {source!r}: cannot read {error.filename}: {error.strerror}") from error
    if size > LARGEST_BYTES:
        raise CorpusError(
            f"corpus {source!r}: {size} bytes, at most {LARGEST_BYTES} are held in memory by every rank"
        )
    return files, size + len(files) - 1  # an end of line between two


def check(source: str, length: int) -> None:
    """Refuse a corpus that is missing, or too small for sequences of ``length`` tokens, without reading it.

    Raises:
        CorpusError: naming it and the numbers.
    """
    _, size = _files_of(source)
    _check_room(source, size - int(size * TRAINING_SHARE), length)


def load(source: str) -> Corpus:
    """Read a corpus: ``"stdlib"``, a file, or a folder.

    Raises:
        CorpusError: naming it, if it is missing, unreadable, empty or too big.
    """
    files, _ = _files_of(source)
    try:
        text = b"\n".join(path.read_bytes() for path in files)
    except OSError as error:
        raise CorpusError(f"corpus {source!r}: cannot read {error.filename}: {error.strerror}") from error
    tokens = np.frombuffer(text, dtype=np.uint8)
    cut = int(len(tokens) * TRAINING_SHARE)
    return Corpus(source, hashlib.sha256(text).hexdigest(), tokens[:cut], tokens[cut:])
