"""A corpus deals the same bytes to everyone who asks alike."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.errors import CorpusError
from harness.workloads import corpus
from harness.workloads.corpus import Corpus, Text, check, load

LETTERS = np.arange(10_000, dtype=np.uint16).astype(np.uint8)
SMALL = Corpus("small", "", LETTERS[:9_500], LETTERS[9_500:])
keys = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "step": st.integers(0, 10_000),
        "micro_batch": st.integers(0, 64),
        "rank": st.integers(0, 1023),
    }
)


@given(keys, st.integers(1, 4), st.integers(1, 400))
def test_batches_are_windows(key: dict[str, int], sequences: int, length: int) -> None:
    """A batch is windows of training text and the next byte at each position, int64."""
    read, answer = Text(SMALL, length).batch(**key, sequences=sequences)
    assert read.shape == answer.shape == (sequences, length)
    assert read.dtype == answer.dtype == np.int64
    assert (np.diff(read) % 256 == 1).all()  # consecutive bytes of the text
    assert ((answer - read) % 256 == 1).all()


@given(keys, keys)
def test_batches_depend_on_their_key(first: dict[str, int], other: dict[str, int]) -> None:
    """Equal keys draw equal batches, different keys different ones."""
    draw = [Text(SMALL, 16).batch(**key, sequences=8)[0] for key in (first, first, other)]
    assert (draw[0] == draw[1]).all()
    assert (draw[0] == draw[2]).all() == (first == other)


def test_batches_are_pinned() -> None:
    """The first batch of seed 0 is the same on every machine and with every version of numpy."""
    read, _ = Text(SMALL, 1).batch(seed=0, step=0, micro_batch=0, rank=0, sequences=3)
    assert read[:, 0].tolist() == [107, 234, 99]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 100))
@example(1, 1, 1, 499)
def test_validation(batches: int, world: int, sequences: int, length: int) -> None:
    """Validation windows lie in the validation split, spread from its start to its end."""
    ranks = [
        Text(SMALL, length).validation_batches(batches=batches, rank=rank, world=world, sequences=sequences)
        for rank in range(world)
    ]
    assert all(part.shape == (sequences, length) for pairs in ranks for pair in pairs for part in pair)
    flat = np.concatenate([read for pairs in ranks for read, _ in pairs])
    assert (np.diff(flat) % 256 == 1).all()
    assert ((np.concatenate([answer for pairs in ranks for _, answer in pairs]) - flat) % 256 == 1).all()
    starts = {int(row[0]) for row in flat}
    assert int(SMALL.validation[0]) in starts
    if len(flat) > 1:
        assert int(SMALL.validation[-length - 1]) in starts


def test_split(tmp_path: Path) -> None:
    """A folder is its files in alphabetical order; the last 5 % of the bytes validate."""
    (tmp_path / "b.txt").write_bytes(b"b" * 500)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(b"a" * 499)
    joined = load(str(tmp_path))
    assert bytes(joined.train) == b"a" * 499 + b"\n" + b"b" * 450
    assert bytes(joined.validation) == b"b" * 50
    assert joined.sha256 == hashlib.sha256(b"a" * 499 + b"\n" + b"b" * 500).hexdigest()


def test_standard_library() -> None:
    """The default corpus is the interpreter's standard library, megabytes of it."""
    stdlib = load("stdlib")
    assert len(stdlib.train) > 2_000_000
    assert b"def " in bytes(stdlib.validation)
    check("stdlib", 4096)


@given(size=st.integers(0, 200), length=st.integers(1, 12))
def test_check_agrees(tmp_path_factory: pytest.TempPathFactory, size: int, length: int) -> None:
    """Exactly the files that could not be drawn from are refused before reading."""
    file = tmp_path_factory.mktemp("corpus") / "text"
    file.write_bytes(b"x" * size)

    def possible(try_it: object) -> bool:
        try:
            try_it()  # type: ignore[operator]
        except CorpusError:
            return False
        return True

    def draw() -> None:
        dataset = Text(load(str(file)), length)
        dataset.batch(seed=0, step=0, micro_batch=0, rank=0, sequences=1)
        dataset.validation_batches(batches=1, rank=0, world=1, sequences=1)

    assert possible(lambda: check(str(file), length)) == possible(draw)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing, empty or huge corpus is refused in one line that names it."""
    with pytest.raises(CorpusError, match=r"'/nowhere/at/all': no such file or folder in /"):
        load("/nowhere/at/all")
    with pytest.raises(CorpusError, match="no files"):
        load(str(tmp_path))
    (tmp_path / "text").write_bytes(b"x" * 100)
    message = "its validation part has 5 tokens, too few for one sequence of 8 and its last"
    with pytest.raises(CorpusError, match=message):
        check(str(tmp_path), 8)
    monkeypatch.setattr(corpus, "LARGEST_BYTES", 99)
    with pytest.raises(CorpusError, match="has 100 bytes, and at most 99 are allowed"):
        load(str(tmp_path))
