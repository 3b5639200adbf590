"""Where ranges lie, which folders are checkpoints, and what a manifest promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.checkpoint_files import (
    Manifest,
    SavedParameter,
    _digest,
    begin,
    checkpoints,
    commit,
    held_ranges,
    latest,
    read_manifest,
    saved_parameters,
    saved_ranges,
    thin,
)
from impl.disk import CheckpointError
from impl.geometry import ParameterSpec, UnitGeometry, lay_out


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
    path = begin(tmp_path)
    assert checkpoints(tmp_path) == []
    assert begin(tmp_path) == path
    commit(path, EMPTY)
    assert checkpoints(tmp_path) == [path]
    (tmp_path / "checkpoint-1000000").mkdir()  # by number, not by name
    assert latest(tmp_path) == tmp_path / "checkpoint-1000000"
    assert begin(tmp_path).name == "checkpoint-1000001"
    thin(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".checkpoint-1000001.partial",
        "checkpoint-1000000",
        "notes",
    ]


def test_a_manifest_comes_back_and_is_checked_by_its_types(tmp_path: Path) -> None:
    """Also one with a right digest: the first value of a wrong type is named."""
    path = begin(tmp_path)
    commit(path, EMPTY)
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
