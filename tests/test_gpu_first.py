"""The first questions to a GPU, rehearsed without one: whoever is killed leaves what it had found."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu_first import ENGINES, questions

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.parametrize("kept", [3, None])
def test_each_answer_is_written_as_it_comes(tmp_path: Path, kept: int | None) -> None:
    """Killed after some lines, the file holds them; whole, every kernel is the reference and every engine
    learns from the same first loss.
    """
    out = tmp_path / "first.jsonl"
    command = [sys.executable, "-m", "tests.gpu_first", "--device", "cpu", "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        printed = list(itertools.islice(process.stdout, kept))
        if kept is not None:
            process.kill()
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [json.loads(line) for line in printed] == found[: len(printed)]
    if kept is not None:
        assert len(found) >= kept
        return
    assert process.returncode == 0, printed
    assert len(found) == len(list(questions(torch.device("cpu"))))
    assert all(line["equal"] for line in found if line["ask"] == "reference")
    engines = [line for line in found if line["ask"] == "engine"]
    assert [line["engine"] for line in engines] == list(ENGINES)
    assert max(line["losses"][0] for line in engines) - min(line["losses"][0] for line in engines) < 0.05
