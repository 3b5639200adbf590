"""A manifest is read as it was written, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from impl.checkpoint.commit import MANIFEST, CheckpointError, begin, commit
from impl.checkpoint.manifest import read_manifest
from tests.impl.checkpoint.checkpointed import EMPTY


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    """All fields are read as they were written."""
    assert read_manifest(commit(begin(tmp_path), EMPTY.text())) == EMPTY


FIELDS = json.loads(EMPTY.text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "is cut short, or is not JSON"),
        (EMPTY.text()[:-9], "is cut short, or is not JSON"),
        ('{"format": "pt"}', "is not a manifest of a zeropp checkpoint"),
        ("[]", "is not a manifest of a zeropp checkpoint"),
        (json.dumps({**FIELDS, "version": 1}), "version 1 of the format, but this program reads version 2"),
        (json.dumps({**FIELDS, "step": 7}), "altered since it was written"),
        (json.dumps({**FIELDS, "extra": float("nan")}), "altered since it was written"),
    ],
)
def test_what_is_no_manifest_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    """Files that are nested too deeply, cut short, foreign, of another version or altered."""
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/manifest.json: .*{message}.*$"):
        read_manifest(tmp_path)
