"""What a manifest promises: it comes back, and what no save writes is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.commit import begin, commit
from impl.checkpoint.manifest import SavedParameter, _digest, read_manifest
from tests.impl.checkpoint.checkpointed import EMPTY


@pytest.mark.parametrize("ranges", [[], [(0, 3, 0)], [(0, 3, 0), (2, 4, 1)], [(1, 4, 0)], [(0, 5, 0)]])
def test_ranges_with_gaps_or_overlaps_are_refused(ranges: list[tuple[int, int, int]]) -> None:
    """What does not make up the parameter is not a manifest's."""
    with pytest.raises(ValueError, match="do not make up its 4 elements"):
        SavedParameter(shape=[4], trainable=True, ranges=ranges)


def test_a_manifest_comes_back_and_is_checked_by_its_types(tmp_path: Path) -> None:
    """Also one with a right digest: the first value of a wrong type is named."""
    path = commit(begin(tmp_path).partial, EMPTY)
    assert read_manifest(path) == EMPTY
    held = {**json.loads(EMPTY.text()), "step": "one"}
    del held["sha256"]
    (path / "manifest.json").write_text(json.dumps({**held, "sha256": _digest(held)}))
    with pytest.raises(CheckpointError, match=r"manifest.json: step: Input should be a valid integer"):
        read_manifest(path)
    held["newer_key"] = held.pop("step")
    (path / "manifest.json").write_text(json.dumps({**held, "sha256": _digest(held)}))
    with pytest.raises(CheckpointError, match=re.escape("manifest.json: step: Field required")):
        read_manifest(path)


FILE = {"name": "rank-00000.safetensors", "nbytes": 64, "sha256": "0" * 64}
VALUE = {"name": "v", "kind": "extra", "of": "", "tensor": None, "value": None}
PARAMETER = {"shape": [4], "trainable": True, "ranges": [[0, 4, 0]]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"files": [{**FILE, "name": "/dev/zero"}]}, "file 0 is '/dev/zero', expected rank-00000"),
        ({"files": [{**FILE, "name": "../../rank-00000.safetensors"}]}, "file 0 is '../../rank"),
        ({"files": [{**FILE, "nbytes": -1}]}, "files.0.nbytes: Input should be greater than or equal to 0"),
        ({"step": -1}, "step: Input should be greater"),
        ({"step": 1 << 80}, "step: "),
        ({"extra": float("nan")}, "cut short, or not JSON"),
        ({"extra": {"__float__": "abc"}}, "is neither a tuple nor a number that is not finite"),
        ({"extra": {"__tuple__": 3}}, "is neither a tuple nor"),
        ({"parameters": {"p": {**PARAMETER, "shape": [-2, -2]}}}, "parameters.p.shape.0: Input should be"),
        (
            {"parameters": {"p": {**PARAMETER, "shape": [1 << 50], "ranges": [[0, 1 << 50, 0]]}}},
            "4503599627370496 bytes of parameters do not fit into file 0",
        ),
        ({"parameters": {"p": {**PARAMETER, "shape": [1 << 62, 4, 0], "ranges": []}}}, "too many elements"),
        ({"parameters": {"p": {**PARAMETER, "ranges": [[0, 4, 7]]}}}, "do not fit into file 7"),
        ({"state": [{**VALUE, "kind": "parameter", "of": "q"}]}, "'v' is of 'q', which is no parameter"),
        ({"state": [{**VALUE, "kind": "buffer"}]}, "'v' is buffer, with tensor None"),
        ({"state": [{**VALUE, "kind": "buffer", "tensor": ["F32", [-1]]}]}, "state.0.tensor.1.0: "),
        ({"state": [{**VALUE, "kind": "buffer", "tensor": ["F33", [1]]}]}, "expected one of F64"),
        ({"state": [VALUE, VALUE]}, "'v' comes 2 times"),
        ({"writer": "\x1b[31mred"}, "writer: String should match pattern"),
        ({"of": {"\x1b": 1}}, r"of.'\\x1b': Input should be a valid string"),
        ({"loss_scale": {"setting": "dynamic"}}, "loss_scale.scale: Field required"),
        (
            {"loss_scale": {"setting": "8", "scale": 0.0, "skipped": 0, "since": 0}},
            "loss_scale.scale: Input should be greater than 0",
        ),
    ],
)
def test_a_manifest_that_no_save_writes_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """Paths of others, sizes that are none, numbers without meaning, control characters: by name."""
    held = {**json.loads(EMPTY.text()), "files": [FILE], **change}
    del held["sha256"]
    (tmp_path / "manifest.json").write_text(json.dumps({**held, "sha256": _digest(held)}))
    with pytest.raises(CheckpointError, match=re.escape(words) if "\\" not in words else words) as told:
        read_manifest(tmp_path)
    assert str(told.value).isprintable()


def test_a_manifest_that_is_no_json_or_no_file_is_refused(tmp_path: Path) -> None:
    """Nested without end, a key twice, and a pipe that would keep its reader waiting."""
    file = tmp_path / "manifest.json"
    deep = json.dumps({"format": "zeropp checkpoint", "version": 1, "x": 0})
    for text, words in [
        ("[" * 200_000, "cut short, or not JSON"),
        (deep.replace("0}", "[" * 5000 + "]" * 5000 + "}"), "not JSON|too deep|altered"),
        ('{"format": "a", "format": "b"}', "cut short, or not JSON"),
    ]:
        file.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            read_manifest(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"manifest.json: not a regular file"):
        read_manifest(tmp_path)
