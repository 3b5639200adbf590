"""Reads corpora: the tokens that language models train on.  Does not import torch.

A suite names its corpus in one of these ways:

- text: ``stdlib`` (the files ``*.py`` in the folder of Python's standard library, without its subfolders), a file, or a
  folder.  All files in a folder and its subfolders are joined in the order of their paths.  The first 95 % of the text
  are for training.  Each byte is a token, unless the suite names a tokenizer of the user's own;
- a folder with the token files ``train.npy`` and ``validation.npy``;
- a ``module:function`` that returns two arrays of tokens, or two pairs of arrays
  (:mod:`harness.workloads.own_pairs`).  The first is for training, and the second for validation.
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
LARGEST_BYTES: Final = 2 << 30  # largest size of a text: every rank holds the whole text in memory
BYTES: Final = 256  # size of the vocabulary without a tokenizer: the number of values of a byte
_TOKEN_FILES: Final = ("train.npy", "validation.npy")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens for training and for validation."""

    source: str  # the corpus as the suite names it
    sha256: str  # digest of the tokens for training, followed by the tokens for validation
    train: NDArray[Any]  # (tokens,), of any integer type
    validation: NDArray[Any]  # (tokens,), of any integer type
    largest: int = BYTES - 1  # the largest token, which the model's vocabulary must include


class Text(Dataset):
    """A data set of sequences of T tokens from a corpus: (B, T) int64 inputs, and (B, T) int64 targets.

    The target of a token is the next token.  With ``masks``, some input tokens are masked as in BERT's training, and
    their original values are the targets (:func:`harness.workloads.masked_text.mask`).
    """

    def __init__(
        self, corpus: Corpus, length: int, *, vocab: int | None = BYTES, masks: bool = False
    ) -> None:
        for name, part in (("validation", corpus.validation), ("training", corpus.train)):
            _check_room(corpus.source, name, len(part), length)
        if vocab is not None and corpus.largest >= vocab:
            why = f"its largest token is {corpus.largest}, and the model's vocabulary has {vocab}"
            wanted = f"set model.arguments.vocab to at least {corpus.largest + 1}"
            raise CorpusError(f"corpus {corpus.source!r}: {why}; {wanted}")
        self.vocab = vocab or BYTES
        self.sha256, self.train, self.validation = corpus.sha256, corpus.train, corpus.validation
        self.length, self.masks = length, masks

    def count(self, part: NDArray[Any]) -> int:
        """Return how many sequences ``part`` has; ``part`` is ``train`` or ``validation``.

        A sequence takes T + 1 tokens, so that each of T inputs has a target.  Sequences may overlap: one sequence
        starts at each token except the last T.  With T = 2, for example, a part of 5 tokens has 3 sequences.
        """
        return len(part) - self.length

    def at(self, part: NDArray[Any], numbers: list[int], keys: list[str]) -> Pair:
        """Return the sequences that start at the tokens ``numbers`` of ``part``, as inputs and targets.

        ``part`` is ``train`` or ``validation``; its first token is number 0.  ``keys`` has a text for each sequence.
        With ``masks``, the hash of this text determines which of the sequence's tokens are masked.
        """
        offsets = np.asarray(numbers)[:, None] + np.arange(self.length + 1)
        windows = part[offsets].astype(np.int64)
        return mask(windows[:, :-1], keys, self.vocab) if self.masks else (windows[:, :-1], windows[:, 1:])


def _check_room(source: str, part: str, size: int, length: int) -> None:
    """Raise a CorpusError if a part of a corpus has fewer than ``length + 1`` tokens.

    A sequence of ``length`` tokens needs one more token, which is the target of its last token.  ``part`` is the name
    of the part, and ``size`` its number of tokens.
    """
    if size <= length:
        enough = f"a text needs at least {int((length + 1) / (1 - TRAINING_SHARE)) + 1} bytes"
        why = f"its {part} part has {size} tokens, too few for one sequence of {length} and its last token's target"
        raise CorpusError(f"corpus {source!r}: {why}; {enough}")


def _files_of(source: str) -> tuple[list[Path], int]:
    """Return the files of a corpus in the order in which their texts are joined, and the size of this text in bytes.

    ``source`` is the path of a file, or of a folder whose files are joined, or the word for Python's standard library.

    Raises:
        CorpusError: if ``source`` names no file, if sizes cannot be read, or if the text is too large.
    """
    place = Path(sysconfig.get_path("stdlib")) if source == STDLIB else folder.path_of(source)
    if place.is_file():
        files = [place]
    elif place.is_dir():
        paths = place.glob("*.py") if source == STDLIB else place.rglob("*")
        files = sorted(path for path in paths if path.is_file())
    else:
        wanted = f"expected a file, a folder, {STDLIB!r} for Python's standard library, or module:function"
        raise CorpusError(f"corpus {source!r}: no such file or folder in {folder.current()}; {wanted}")
    if not files:
        raise CorpusError(
            f"corpus {source!r}: the folder has no files in it; put texts into it, or name another corpus"
        )
    with raising(CorpusError, f"corpus {source!r}: cannot read it:"):
        size = sum(path.stat().st_size for path in files)
    if size > LARGEST_BYTES:
        raise CorpusError(
            f"corpus {source!r}: has {size} bytes, and at most {LARGEST_BYTES} are allowed, since every rank holds the "
            "whole text in memory: name a smaller text"
        )
    return files, size + len(files) - 1  # with a line break between two files


def check(source: str, length: int) -> None:
    """Raise a CorpusError if a text is missing, or if its validation part is too small for a sequence.

    ``length`` is the number of bytes of a sequence.  Only the sizes of files are read, not their contents.
    """
    _, size = _files_of(source)
    _check_room(source, "validation", size - int(size * TRAINING_SHARE), length)


def load(source: str, tokenizer: str | None = None) -> Corpus | OwnPairs:
    """Read a corpus.

    Args:
        source: The corpus as a suite names it; see the module's documentation.
        tokenizer: A ``module:function`` that makes tokens of a text.  If it is None, each byte is a token.

    Raises:
        CorpusError: if the corpus cannot be read or is not of one of the known kinds.
    """
    if holds_arrays(source):
        if tokenizer is not None:
            raise CorpusError(
                f"corpus {source!r}: consists of arrays, which need no tokenizer; remove tokenizer"
            )
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
    """Return whether a corpus consists of arrays rather than of text.

    Arrays come from a folder with token files, or from a user's function.

    Raises:
        CorpusError: if a folder has only one of the two token files.
    """
    place = folder.path_of(source)
    if not place.exists():
        return is_name(source)
    files = [name for name in _TOKEN_FILES if (place / name).is_file()]
    if len(files) == 1:
        raise CorpusError(
            f"corpus {source!r}: has only {files[0]}; a corpus of tokens needs {' and '.join(_TOKEN_FILES)}"
        )
    return bool(files)


@lru_cache(1)
def _of_arrays(source: str, _: Path) -> Corpus | OwnPairs:
    """Read a corpus of arrays from a folder with token files, or from a user's function.

    The second argument is the suite's folder.  It is there only as a part of the cache's key, because a relative path
    ``source`` names another corpus in another folder.
    """
    place = folder.path_of(source)
    if place.is_dir():
        parts: Any = []
        for name in _TOKEN_FILES:
            with raising(CorpusError, f"corpus {source!r}: {name}:"):
                parts.append(np.load(place / name, mmap_mode="r", allow_pickle=False))
    else:
        parts = _call(f"corpus {source!r}", source)
    if not isinstance(parts, tuple | list) or len(parts) != 2:  # train, validation
        wanted = "two values, for training and for validation, each an array of tokens or a pair of arrays"
        length = f" and length {len(parts)}" if isinstance(parts, tuple | list) else ""
        raise CorpusError(
            f"corpus {source!r}: returned a value of type {type(parts).__name__}{length}; expected {wanted}"
        )
    if are_pairs(parts):
        return OwnPairs(source, parts)
    return _of_tokens(source, f"corpus {source!r}", parts)


@lru_cache(1)
def _tokenised(source: str, tokenizer: str, train: bytes, validation: bytes) -> Corpus:
    """Make a corpus from the two parts of a text with a user's tokenizer.

    Bytes that are not valid UTF-8 are replaced with U+FFFD.  If the border between the two parts lies inside a
    character, the bytes of this character are replaced too.
    """
    function = f"tokenizer {tokenizer!r}"
    texts = (part.decode(errors="replace") for part in (train, validation))
    return _of_tokens(source, function, (_call(function, tokenizer, text) for text in texts))


def _of_tokens(source: str, origin: str, parts: Iterable[Any]) -> Corpus:
    """Make a corpus from two arrays of tokens, for training and for validation.

    ``origin`` is the beginning of error messages.
    """
    train, validation = (_check_tokens(origin, part) for part in parts)
    digest = hashlib.sha256()
    for part in (train, validation):
        digest.update(str((part.dtype.str, len(part))).encode())
        digest.update(np.ascontiguousarray(part).data)
    largest = max(int(part.max(initial=0)) for part in (train, validation))
    return Corpus(source, digest.hexdigest(), train, validation, largest)


def _call(origin: str, name: str, *arguments: str) -> Any:
    """Call a user's function and return its result.

    Raises:
        CorpusError: if the function cannot be imported, or raises an exception.  The message begins with ``origin``.
    """
    try:
        function = import_object(name)
    except NamedObjectError as error:
        raise CorpusError(f"{origin}: {error}") from error
    with raising(CorpusError, f"{origin}: raised"):
        return function(*arguments)


def _check_tokens(origin: str, tokens: Any) -> NDArray[Any]:
    """Return tokens as an array (n,) of integers.

    Raises:
        CorpusError: if ``tokens`` cannot be converted into such an array, or if the array is empty or has a negative
            number.  The message begins with ``origin``.
    """
    with raising(CorpusError, f"{origin}: no array of tokens:"):
        row = np.asarray(tokens)
    if row.ndim != 1 or row.dtype.kind not in "iu" or not len(row):
        wanted = "expected one dimension of whole numbers, with at least one number"
        raise CorpusError(
            f"{origin}: tokens are an array of shape {row.shape} and type {row.dtype}; {wanted}"
        )
    if int(row.min()) < 0:
        raise CorpusError(f"{origin}: has a token {int(row.min())}; expected tokens of 0 and above")
    return row
