"""Where ranges lie, which folders are checkpoints, and what a manifest promises."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.checkpoint import atomic_files as disk
from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.manifest import (
    Manifest,
    SavedFile,
    SavedParameter,
    _digest,
    begin,
    checkpoints,
    commit,
    latest,
    read_manifest,
    saved_parameters,
    thin,
    verify,
)
from impl.checkpoint.ranges import held_ranges, saved_ranges
from impl.plan.geometry import ParameterSpec, UnitGeometry, lay_out


@st.composite
def geometries(draw: st.DrawFn) -> UnitGeometry:
    """Units of a few parameters over worlds of up to 6 ranks, in groups that divide them."""
    world = draw(st.integers(1, 6))
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=2), min_size=1, max_size=4))
    specs = [ParameterSpec(f"p{i}", tuple(shape), i % 2) for i, shape in enumerate(shapes)]
    group = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return lay_out(
        "unit", specs, grain=draw(st.integers(1, 9)), world=world, max_padding=float("inf"), group=group
    )


@given(geometries())
def test_ranks_save_every_element_once(geometry: UnitGeometry) -> None:
    """Over all ranks and groups the saved ranges make up each parameter, inside what the rank holds."""
    for slot in geometry.slots:
        found = []
        for rank in range(geometry.world):
            saved = [one for one in saved_ranges(geometry, rank) if one.slot is slot]
            held = {one.name: one for one in held_ranges(geometry, rank)}
            for one in saved:
                whole = held[one.name]
                assert whole.start <= one.start < one.end <= whole.end
                assert one.at - whole.at == one.start - whole.start
            found += [e for one in saved for e in range(one.start, one.end)]
        assert sorted(found) == list(range(slot.spec.numel))


@given(geometries(), st.integers(0, 49), st.integers(0, 49))
def test_any_range_is_found_in_the_saved_ones(geometry: UnitGeometry, start: int, end: int) -> None:
    """overlapping() gives all ranges that hold some of [start, end), and no other."""
    for saved in saved_parameters([geometry], geometry.world).values():
        found = list(saved.overlapping(start, end))
        wanted = [one for one in saved.ranges if one[0] < end and one[1] > start] if start < end else []
        assert [tuple(one) for one in found] == wanted


@pytest.mark.parametrize("ranges", [[], [(0, 3, 0)], [(0, 3, 0), (2, 4, 1)], [(1, 4, 0)], [(0, 5, 0)]])
def test_ranges_with_gaps_or_overlaps_are_refused(ranges: list[tuple[int, int, int]]) -> None:
    """What does not make up the parameter is not a manifest's."""
    with pytest.raises(ValueError, match="do not make up its 4 elements"):
        SavedParameter(shape=[4], trainable=True, ranges=ranges)


EMPTY = Manifest(
    format="zeropp checkpoint",
    version=1,
    writer="a test",
    step=0,
    micro_batch=0,
    topology="1x1",
    of={},
    parameters={},
    state=[],
    optimizers=[],
    loss_scale=None,
    extra=None,
    files=[],
)


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    """A partial one is none; numbers go on; what broken saves left is removed; others' folders are left."""
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    broken = begin(tmp_path)
    broken.release()  # its process is gone
    assert checkpoints(tmp_path) == []
    path = commit(begin(tmp_path).partial, EMPTY)
    assert checkpoints(tmp_path) == [path] == [tmp_path / "checkpoint-000001"]
    shutil.copytree(path, tmp_path / "checkpoint-1000000")  # by number, not by name
    assert latest(tmp_path) == tmp_path / "checkpoint-1000000"
    (tmp_path / "checkpoint-1000004").mkdir()  # without a manifest
    assert latest(tmp_path) == tmp_path / "checkpoint-1000000"
    assert commit(begin(tmp_path).partial, EMPTY).name == "checkpoint-1000005"
    thin(tmp_path, 1)
    names = ["checkpoint-1000004", "checkpoint-1000005", "notes"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_what_others_save_now_is_left_alone(tmp_path: Path) -> None:
    """Two saves under way in one folder have numbers of their own, and each is completed, in any order."""
    first, second = begin(tmp_path), begin(tmp_path)
    assert first.partial.is_dir()
    assert commit(second.partial, EMPTY).name == "checkpoint-000002"
    assert begin(tmp_path).partial.name.startswith(".checkpoint-000003.")
    assert commit(first.partial, EMPTY).name == "checkpoint-000001"
    assert len(checkpoints(tmp_path)) == 2


def test_a_checkpoint_is_completed_of_the_files_that_were_written(tmp_path: Path) -> None:
    """A file that has gone, or changed its size, is an error; nothing is complete then."""
    begun = begin(tmp_path)
    held = EMPTY.model_copy(update={"files": [SavedFile(name="rank-00000.safetensors", nbytes=3, sha256="")]})
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: No such file"):
        commit(begun.partial, held)
    (begun.partial / "rank-00000.safetensors").write_bytes(b"four")
    with pytest.raises(CheckpointError, match="4 bytes, the manifest says 3"):
        commit(begun.partial, held)
    assert checkpoints(tmp_path) == []


def test_where_folders_have_no_locks_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A partial checkpoint that may be of another save stays, and a line says so."""

    def unknown(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unknown)
    first = begin(tmp_path)
    second = begin(tmp_path)
    assert first.partial.is_dir()
    assert second.partial != first.partial
    assert "may be of a save under way" in caplog.text


def test_thinning_takes_links_and_what_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a link the name goes and its target stays; a disk that refuses is a warning, not an error."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    commit(begin(run).partial, EMPTY).rename(elsewhere)
    (run / "checkpoint-000001").symlink_to(elsewhere)
    commit(begin(run).partial, EMPTY)
    thin(run, 1)
    assert [path.name for path in run.iterdir()] == ["checkpoint-000002"]
    assert read_manifest(elsewhere) == EMPTY
    commit(begin(run).partial, EMPTY)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "rename", refuse)
    thin(run, 1)
    assert "checkpoint-000002: older than the 1 to be kept, and stays: Permission denied" in caplog.text


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


def test_files_are_looked_at_before_they_are_read(tmp_path: Path) -> None:
    """A pipe, a link and a file of another size are refused unopened."""
    saved = SavedFile(name="rank-00000.safetensors", nbytes=3, sha256="")
    path = tmp_path / saved.name
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        verify(tmp_path, [saved])
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        verify(tmp_path, [saved])
