"""Corpora: the tokens that language models train on.  No torch.

Text (``stdlib``, a file, all files of a folder in alphabetical order), of which the first 95 % are for
training, whose bytes are the tokens unless a tokenizer makes others; or arrays: a folder with ``train.npy``
and ``validation.npy``, or what a ``module:function`` returns.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from harness.errors import CorpusError
from harness.suites import folder
from harness.workloads.dataset import Dataset, Pair
from harness.workloads.masked_text import mask
from harness.workloads.own_pairs import OwnPairs, are_pairs
from impl.errors import raising
from impl.named_object import NamedObjectError, import_object, is_name

STDLIB: Final = "stdlib"
TRAINING_SHARE: Final = 0.95
LARGEST_BYTES: Final = 2 << 30  # a corpus is held in memory by every rank
BYTES: Final = 256  # values of a byte
_TOKEN_FILES: Final = ("train.npy", "validation.npy")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens for training and for validation."""

    source: str  # its name in the suite
    sha256: str  # of all tokens, training first
    train: NDArray[Any]  # (tokens,), of any type of whole numbers
    validation: NDArray[Any]  # (tokens,), likewise
    largest: int = BYTES - 1  # largest token


class Text(Dataset):
    """Windows of a corpus: (B, T) int64 tokens, and the next tokens or, masked, the missing ones."""

    def __init__(
        self, corpus: Corpus, length: int, *, vocab: int | None = BYTES, masks: bool = False
    ) -> None:
        for part in (corpus.validation, corpus.train):
            _check_room(corpus.source, len(part), length)
        if vocab is not None and corpus.largest >= vocab:
            why = f"its largest token is {corpus.largest}, and the vocabulary has {vocab}"
            wanted = f"expected model.arguments.vocab of at least {corpus.largest + 1}"
            raise CorpusError(f"corpus {corpus.source!r}: {why}; {wanted}")
        self.vocab = vocab or BYTES
        self.sha256, self.train, self.validation = corpus.sha256, corpus.train, corpus.validation
        self.length, self.masks = length, masks

    def count(self, part: NDArray[Any]) -> int:
        """Number of offsets at which a window of T + 1 bytes can start."""
        return len(part) - self.length

    def at(self, part: NDArray[Any], numbers: list[int], keys: list[str]) -> Pair:
        """The windows that start at these offsets; ``keys`` decide what is masked."""
        offsets = np.asarray(numbers)[:, None] + np.arange(self.length + 1)
        windows = part[offsets].astype(np.int64)
        return mask(windows[:, :-1], keys, self.vocab) if self.masks else (windows[:, :-1], windows[:, 1:])


def _check_room(source: str, size: int, length: int) -> None:
    """Refuse validation bytes that do not hold one window of ``length + 1``."""
    if size <= length:
        enough = f"of text, {int((length + 1) / (1 - TRAINING_SHARE)) + 1} bytes do"
        why = f"{size} tokens for validation or training do not hold one sequence of {length}"
        raise CorpusError(f"corpus {source!r}: {why} and its last target; {enough}")


def _files_of(source: str) -> tuple[list[Path], int]:
    """The files of ``source`` in the order in which they are joined, and the bytes of the whole."""
    place = Path(sysconfig.get_path("stdlib")) if source == STDLIB else folder.path_of(source)
    if place.is_file():
        files = [place]
    elif place.is_dir():
        paths = place.glob("*.py") if source == STDLIB else place.rglob("*")
        files = sorted(path for path in paths if path.is_file())
    else:
        wanted = f"expected one, {STDLIB!r} for Python's standard library, or module:function"
        raise CorpusError(f"corpus {source!r}: no such file or folder in {folder.current()}; {wanted}")
    if not files:
        raise CorpusError(f"corpus {source!r}: no files in it")
    with raising(CorpusError, f"corpus {source!r}: cannot read it:"):
        size = sum(path.stat().st_size for path in files)
    if size > LARGEST_BYTES:
        raise CorpusError(f"corpus {source!r}: {size} bytes, at most {LARGEST_BYTES} are held by every rank")
    return files, size + len(files) - 1  # an end of line between two


def check(source: str, length: int) -> None:
    """Refuse a text that is missing, or too small for sequences of ``length`` bytes, without reading it."""
    _, size = _files_of(source)
    _check_room(source, size - int(size * TRAINING_SHARE), length)


def load(source: str, tokenizer: str | None = None) -> Corpus | OwnPairs:
    """Read a corpus (see the module); a CorpusError names it and the fault."""
    if holds_arrays(source):
        if tokenizer is not None:
            raise CorpusError(f"corpus {source!r}: has tokens already; expected no tokenizer beside it")
        return _of_arrays(source, folder.current())
    files, _ = _files_of(source)
    with raising(CorpusError, f"corpus {source!r}: cannot read it:"):
        text = b"\n".join(path.read_bytes() for path in files)
    cut = int(len(text) * TRAINING_SHARE)
    if tokenizer is not None:
        return _tokenised(source, tokenizer, text[:cut], text[cut:])
    tokens = np.frombuffer(text, dtype=np.uint8)
    return Corpus(source, hashlib.sha256(text).hexdigest(), tokens[:cut], tokens[cut:])


def holds_arrays(source: str) -> bool:
    """Whether a corpus is arrays (token files, or a function) and no text."""
    place = folder.path_of(source)
    if not place.exists():
        return is_name(source)
    files = [name for name in _TOKEN_FILES if (place / name).is_file()]
    if len(files) == 1:
        raise CorpusError(f"corpus {source!r}: expected the files {' and '.join(_TOKEN_FILES)}, or neither")
    return bool(files)


@lru_cache(1)
def _of_arrays(source: str, _: Path) -> Corpus | OwnPairs:
    """The corpus of a folder of token files, or of a function."""
    place = folder.path_of(source)
    if place.is_dir():
        parts: Any = []
        for name in _TOKEN_FILES:
            with raising(CorpusError, f"corpus {source!r}: {name}:"):
                parts.append(np.load(place / name, mmap_mode="r", allow_pickle=False))
    else:
        parts = _call(f"corpus {source!r}", source)
    if not isinstance(parts, tuple | list) or len(parts) != 2:  # train, validation
        wanted = "tokens for training and for validation, or a pair for each"
        raise CorpusError(f"corpus {source!r}: returned a {type(parts).__name__}; expected {wanted}")
    if are_pairs(parts):
        return OwnPairs(source, parts)
    return _of_tokens(source, f"corpus {source!r}", parts)


@lru_cache(1)
def _tokenised(source: str, tokenizer: str, train: bytes, validation: bytes) -> Corpus:
    """The corpus of a text by a user's tokenizer; a character that the cut halves is replaced."""
    function = f"tokenizer {tokenizer!r}"
    texts = (part.decode(errors="replace") for part in (train, validation))
    return _of_tokens(source, function, (_call(function, tokenizer, text) for text in texts))


def _of_tokens(source: str, origin: str, parts: Iterable[Any]) -> Corpus:
    """The corpus of rows of token numbers for training and validation; ``origin`` is named in errors."""
    train, validation = (_check_tokens(origin, part) for part in parts)
    digest = hashlib.sha256()
    for part in (train, validation):
        digest.update(str((part.dtype.str, len(part))).encode())
        digest.update(np.ascontiguousarray(part).data)
    largest = max(int(part.max(initial=0)) for part in (train, validation))
    return Corpus(source, digest.hexdigest(), train, validation, largest)


def _call(origin: str, name: str, *arguments: str) -> Any:
    """Call a user's function; ``origin`` is named in errors."""
    try:
        function = import_object(name)
    except NamedObjectError as error:
        raise CorpusError(f"{origin}: {error}") from error
    with raising(CorpusError, f"{origin}: raised"):
        return function(*arguments)


def _check_tokens(origin: str, tokens: Any) -> NDArray[Any]:
    """The tokens as an array; refuse anything but a row of token numbers."""
    with raising(CorpusError, f"{origin}: no array of tokens:"):
        row = np.asarray(tokens)
    if row.ndim != 1 or row.dtype.kind not in "iu" or not len(row):
        wanted = "expected one dimension of whole numbers"
        raise CorpusError(f"{origin}: an array {row.shape} of {row.dtype}; {wanted}")
    if int(row.min()) < 0:
        raise CorpusError(f"{origin}: has a token {int(row.min())}; expected 0 and above")
    return row
