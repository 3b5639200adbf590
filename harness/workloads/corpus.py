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

STDLIB: Final = "stdlib"
TRAINING_SHARE: Final = 0.95
LARGEST_BYTES: Final = 2 << 30  # a corpus is held in memory by every rank

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text, split into training and validation bytes.

    Attributes:
        source: its name in the suite.
        files: number of files that were joined.
        sha256: of all bytes, training first.
        train: (bytes,) uint8.
        validation: (bytes,) uint8.
    """

    source: str
    files: int
    sha256: str
    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]

    def batch(
        self, *, seed: int, step: int, micro_batch: int, rank: int, sequences: int, length: int
    ) -> Tokens:
        """Training windows of one micro-batch of one rank.

        Args:
            seed: of the trial.
            step: optimizer step, warm-ups included, from 0.
            micro_batch: index within the step.
            rank: global rank.
            sequences: windows to draw.
            length: tokens of a sequence, T.

        Returns:
            (sequences, T + 1) int64; inputs are ``[:, :-1]``, targets ``[:, 1:]``.

        Raises:
            CorpusError: if the training bytes do not hold one window.
        """
        room = self._room(self.train, "training", length)
        starts = [draw(f"{seed}/{step}/{micro_batch}/{rank}/{index}", room) for index in range(sequences)]
        return _windows(self.train, starts, length)

    def validation_batches(
        self, *, batches: int, rank: int, world: int, sequences: int, length: int
    ) -> list[Tokens]:
        """Windows spread evenly over the validation bytes, dealt to the ranks.

        They depend on neither seed nor step.

        Args:
            batches: per rank.
            rank: whose.
            world: number of ranks.
            sequences: windows in a batch.
            length: tokens of a sequence, T.

        Returns:
            ``batches`` arrays of (sequences, T + 1) int64.

        Raises:
            CorpusError: if the validation bytes do not hold one window.
        """
        room = self._room(self.validation, "validation", length)
        windows = batches * world * sequences

        def start(batch: int, index: int) -> int:
            return spread((batch * world + rank) * sequences + index, windows, room)

        return [
            _windows(self.validation, [start(batch, index) for index in range(sequences)], length)
            for batch in range(batches)
        ]

    def _room(self, part: NDArray[np.uint8], name: str, length: int) -> int:
        """Number of offsets at which a window of ``length + 1`` bytes can start."""
        _check_room(self.source, len(part), name, length)
        return len(part) - length


def _check_room(source: str, size: int, name: str, length: int) -> None:
    """Refuse a split of ``size`` bytes that does not hold one window of ``length + 1``."""
    if size <= length:
        raise CorpusError(
            f"corpus {source!r}: its {size} {name} bytes do not hold one sequence of {length} tokens "
            f"and its last target; a text of at least {int((length + 1) / (1 - TRAINING_SHARE)) + 1} "
            "bytes does"
        )


def draw(key: str, room: int) -> int:
    """A pseudo-random number below ``room``: a hash of ``key``, equal in every version of every library."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little") % room


def spread(number: int, count: int, room: int) -> int:
    """Offset below ``room`` of the ``number``-th of ``count`` windows that are spread evenly."""
    return number * (room - 1) // max(count - 1, 1)


def _windows(part: NDArray[np.uint8], starts: list[int], length: int) -> Tokens:
    """(len(starts), length + 1) int64: bytes of ``part`` from each start."""
    offsets = np.asarray(starts)[:, None] + np.arange(length + 1)
    return part[offsets].astype(np.int64)


def files_of(source: str) -> list[Path]:
    """The files that make up ``source``, in the order in which they are joined.

    Raises:
        CorpusError: if there are none, or more bytes than :data:`LARGEST_BYTES`.
    """
    if source == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"))
    else:
        folder = Path(source)
        if folder.is_file():
            files = [folder]
        elif folder.is_dir():
            files = sorted(path for path in folder.rglob("*") if path.is_file())
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
    return files


def check(source: str, length: int) -> None:
    """Refuse a corpus that is missing or too small, without reading it.

    Args:
        source: as a suite names it.
        length: tokens of a sequence.

    Raises:
        CorpusError: naming it and the numbers.
    """
    files = files_of(source)
    size = sum(path.stat().st_size for path in files) + len(files) - 1
    _check_room(source, size - int(size * TRAINING_SHARE), "validation", length)


def load(source: str) -> Corpus:
    """Read a corpus.

    Args:
        source: ``"stdlib"``, a file, or a folder.

    Raises:
        CorpusError: naming it, if it is missing, unreadable, empty or too big.
    """
    files = files_of(source)
    try:
        text = b"\n".join(path.read_bytes() for path in files)
    except OSError as error:
        raise CorpusError(f"corpus {source!r}: cannot read {error.filename}: {error.strerror}") from error
    tokens = np.frombuffer(text, dtype=np.uint8)
    cut = int(len(tokens) * TRAINING_SHARE)
    return Corpus(source, len(files), hashlib.sha256(text).hexdigest(), tokens[:cut], tokens[cut:])
