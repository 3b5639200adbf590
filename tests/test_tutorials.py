"""The tutorials' commands run as they stand there, and their configurations are DeepSpeed's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cli import main
from harness.suites.model_sizes import GPTShape
from harness.workloads.models import GPT
from impl.comm.mesh import Mesh
from impl.deepspeed.recipe import QGZ, QWZ, recipe
from impl.zero import shard
from tests.harness.train.test_loop import losses
from tests.impl.deepspeed.test_recipe import SNIPPETS, ZERO
from tests.support.ranks import each_rank
from tests.support.training import booked
from tests.test_readme import torchrun

PAGES = Path(__file__).parents[1] / "docs" / "guide"
FILES = re.compile(r"^cat > (\S+) <<'JSON'\n(.*?)^JSON\n", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["zero.md", "zeropp.md"])
def test_every_command_of_a_tutorial_runs(
    page: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one folder, in seconds, with a line a step; stages 1 and 2 have equal losses in fp32."""
    monkeypatch.chdir(tmp_path)
    trained: list[list[float]] = []
    for block in blocks(page):
        for name, text in FILES.findall(block):
            (tmp_path / name).write_text(text, encoding="utf-8")
        for line in FILES.sub("", block).replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            assert program == "zeropp"
            assert main(arguments) == 0, capfd.readouterr().err
            values = losses(capfd.readouterr().out)
            assert len(values) == (2 if arguments[0] == "train" and "--plan" not in arguments else 0)
            trained += [values] if values else []
    assert all(abs(loss - 5.55) < 0.3 for values in trained for loss in values)  # ln 256 and a little
    if page == "zero.md":
        assert trained[0] == pytest.approx(trained[1], abs=2e-6)


def configurations(page: str) -> list[Any]:
    return [json.loads(text) for block in blocks(page) for _, text in FILES.findall(block)]


def test_the_configurations_are_those_of_deepspeed_s_tutorials() -> None:
    """Key by key and value by value; the last is the one before with a threshold and hpZ's size of a toy."""
    *shown, toy = configurations("zero.md") + configurations("zeropp.md")
    assert shown == [{ZERO: keys} for keys in SNIPPETS.values()]
    changed = {"stage3_param_persistence_threshold": 1000, "zero_hpz_partition_size": 2}
    assert toy == {ZERO: shown[-1][ZERO] | changed}


@each_rank(2, 2)
def test_the_toy_s_blocks_travel_as_int8_and_int4(mesh: Mesh) -> None:
    """Forward gathers send three frames of int8 for each shard, reductions three of int4, on 2 x 2 ranks."""
    table = configurations("zeropp.md")[-1] | {"fp16": {"enabled": True}}
    net, tokens = GPT(GPTShape(layers=2, width=64, heads=2), 128), torch.zeros(1, 128, dtype=torch.int64)
    zero = shard(net, mesh=mesh, policy=recipe(table, topology=mesh.topology).policy)
    zero.scaler.scaled(net(tokens, tokens)).backward()
    cut = [unit.geometry for unit in zero.units if not unit.geometry.persistent]
    assert len(cut) == 3  # the root and two blocks
    for unit in cut:
        for phase, purpose, codec in (("forward", "weights", QWZ), ("backward", "gradients", QGZ)):
            sent = booked(zero, phase=phase, purpose=purpose, unit=unit.name)
            assert sent == 3 * codec.frame_bytes(unit.shard)


@pytest.mark.long
def test_the_script_of_the_zero_tutorial_runs_under_torchrun(tmp_path: Path) -> None:
    """As it stands there, on two ranks."""
    text = (PAGES / "zero.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(# own\.py.*?)```", text, re.DOTALL)
    (tmp_path / "own.py").write_text(script, encoding="utf-8")
    (tmp_path / "ds_zero_stage_1.json").write_text(json.dumps(configurations("zero.md")[0]), encoding="utf-8")
    output = "\n".join(torchrun(tmp_path / "own.py", 2))
    first, second = map(float, re.findall(r"^step \d: loss ([\d.]+)$", output, re.MULTILINE))
    assert second < first
