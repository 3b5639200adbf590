"""Files that any reader of safetensors reads, written as a stream and read by ranges."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import torch as library
from torch import Tensor

from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.safetensors_file import Entry, Reader, Written, digest_of, write
from impl.checkpoint.tensor_bytes import NAMES, content, entry_of

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def dicts_of_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of every type and odd shapes, under any names."""
    names = draw(st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True))
    return {
        name: torch.arange(64)[: int(torch.tensor(shape).prod())]
        .view(shape)
        .to(draw(st.sampled_from([*NAMES])))
        for name in names
        for shape in [draw(SHAPES)]
    }


def _write(path: Path, tensors: dict[str, Tensor]) -> Written:
    path.unlink(missing_ok=True)
    entries = {name: entry_of(tensor, name) for name, tensor in tensors.items()}
    return write(path, entries, map(content, tensors.values()), {"of": "a test"})


def _same(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and bytes(content(one)) == bytes(content(other))
    )


@given(dicts_of_tensors())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]
) -> None:
    """Names, types, shapes and bytes come back, and the digest is the file's."""
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    written = _write(path, tensors)
    assert written == digest_of(path)
    reader = Reader(path)
    assert reader.entries == {name: entry_of(tensor, name) for name, tensor in tensors.items()}
    held = [name for name, tensor in tensors.items() if tensor.numel()]
    assert [name for name in reader.entries if reader.entries[name].numel] == held  # in the file's order
    assert reader.metadata == {"of": "a test"}
    for name, tensor in tensors.items():
        assert _same(reader.read(name).view(tensor.shape), tensor)


@given(dicts_of_tensors().filter(lambda tensors: "__metadata__" not in tensors))
def test_the_library_reads_and_writes_the_same_files(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]
) -> None:
    """The format's own library reads what is written here, and what it writes is read here."""
    path = tmp_path_factory.getbasetemp() / "library.safetensors"
    _write(path, tensors)
    loaded = library.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(_same(loaded[name], tensor) for name, tensor in tensors.items())
    library.save_file(tensors, path)
    reader = Reader(path)
    for name, tensor in tensors.items():
        assert _same(reader.read(name).view(tensor.shape), tensor)


@given(st.integers(0, 20), st.integers(0, 20))
def test_any_range_of_elements_is_read_alone(
    tmp_path_factory: pytest.TempPathFactory, start: int, end: int
) -> None:
    """Elements [start, end) are those of the flattened tensor; beyond its end is an error."""
    path = tmp_path_factory.getbasetemp() / "range.safetensors"
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    _write(path, {"first": torch.ones(2), "values": values})
    reader = Reader(path)
    if start <= end <= 15:
        assert torch.equal(reader.read("values", start, end), values.view(-1)[start:end])
    else:
        with pytest.raises(CheckpointError, match="has 15 elements, not"):
            reader.read("values", start, end)


@given(st.integers(0, 200))
def test_a_file_that_is_cut_short_is_refused(tmp_path_factory: pytest.TempPathFactory, keep: int) -> None:
    """Whatever is missing at the end, the file is refused as soon as it is opened."""
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    whole = _write(path, {"values": torch.ones(9)})
    data = path.read_bytes()
    path.write_bytes(data[: min(keep, whole.nbytes - 1)])
    with pytest.raises(CheckpointError, match="cut short"):
        Reader(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"[]", "not a safetensors file"),
        (b"{", "not a safetensors file"),
        (b'{"a": 1}', "not a safetensors file"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "not a safetensors file"),
        (b'{"a": {"dtype": "F7", "shape": [], "data_offsets": [0, 4]}}', "unknown variant `F7`, expected"),
        (b'{"a": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}', "type 'U16': expected one of F64"),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
            "not a safetensors file",
        ),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, header: bytes, words: str) -> None:
    """What is not of the format is one clear line that names the file."""
    path = tmp_path / "foreign"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=words) as caught:
        Reader(path)
    assert str(path) in str(caught.value)
    with pytest.raises(CheckpointError, match="No such file"):
        Reader(tmp_path / "nowhere")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Opening it would wait for a writer on all ranks."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: not a regular file"):
        Reader(tmp_path / "pipe")


def test_contents_must_be_what_the_header_says(tmp_path: Path) -> None:
    """Contents of another size, or number, than announced are refused, never padded."""
    with pytest.raises(ValueError, match="'a' has 3 bytes, not 4"):
        write(tmp_path / "size", {"a": Entry("F32", ())}, [b"abc"])
    with pytest.raises(ValueError, match="shorter"):
        write(tmp_path / "number", {"a": Entry("F32", ())}, [])


def test_the_header_is_padded_to_eight_bytes(tmp_path: Path) -> None:
    """Tensors begin on a multiple of 8 bytes, as the format advises."""
    _write(tmp_path / "file", {"odd name": torch.ones(1)})
    data = (tmp_path / "file").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length])["odd name"]["data_offsets"] == [0, 4]
