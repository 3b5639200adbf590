"""``zeropp checkpoints`` and ``zeropp export``; the docs' program that reads a checkpoint by itself."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.cli import main
from impl.checkpoint.save_load import save
from impl.comm.mesh import Mesh
from impl.plan.policy import parse_loss_scale, preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.support.models import Odd
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, model

NET, ODD = model(), model(Odd)


def _saved(mesh: Mesh, folder: Path, net: torch.nn.Module) -> None:
    zero = shard(copy.deepcopy(net), mesh=mesh, policy=preset("zero3", memory=ROOMY))
    optimizer = torch.optim.AdamW(zero.param_groups())
    for _ in range(2):
        save(folder, zero, [optimizer])


def test_checkpoints_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, of a folder of them or of one: step, elements, optimizers, bytes, where from."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    assert main(["checkpoints", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    sizes = [parameter.numel() for parameter in NET.parameters()]
    words = f"{sum(sizes):,} elements in {len(sizes)} parameters, optimizers AdamW"
    assert f"checkpoint-000002: step 0, {words}" in lines[1]
    assert "in 2 files, from 2x1 ranks at stage 3; zeropp " in lines[1]
    assert main(["checkpoints", str(tmp_path / "checkpoint-000001")]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:1]


def test_a_checkpoint_that_is_cut_short_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All are listed, and one line names the file and both sizes; status 2."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    file = tmp_path / "checkpoint-000001" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert main(["checkpoints", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 2
    assert re.search(r"rank-00001.safetensors: 100 bytes, the manifest says \d+\n$", told.err)


def _altered(file: Path) -> None:
    """One bit of the last byte is another."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_was_checked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An altered file has its size: a listing says that contents were not checked, and --verify finds it."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert all(line.endswith("; sizes and digests checked") for line in capsys.readouterr().out.splitlines())
    _altered(tmp_path / "checkpoint-000001" / "rank-00001.safetensors")
    assert main(["checkpoints", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith("; sizes checked, contents not (--verify)") for line in lines)
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 2
    told = capsys.readouterr()
    first, second = told.out.splitlines()
    words = "rank-00001.safetensors: altered since it was written: its digest is another"
    assert re.search(rf"checkpoint-000001: step 0, .*; BROKEN: .*{words}$", first)
    assert second.endswith("; sizes and digests checked")
    assert told.err.endswith(f"{words}\n")
    assert main(["export", str(tmp_path / "checkpoint-000001"), str(tmp_path / "out")]) == 2


def test_a_broken_manifest_hides_no_other_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a line; the error says how many are broken."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    manifest = tmp_path / "checkpoint-000001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 0', '"step": 1'))
    assert main(["checkpoints", str(tmp_path)]) == 2
    told = capsys.readouterr()
    first, second = told.out.splitlines()
    assert "checkpoint-000001: BROKEN: " in first
    assert "checkpoint-000002: step 0, " in second
    assert "manifest.json: altered since it was written" in told.err
    (tmp_path / "checkpoint-000002" / "rank-00000.safetensors").unlink()
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("(the first of 2 that are broken)\n")


def test_a_checkpoint_without_its_manifest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that has a checkpoint's name, which only whole ones get, is not passed over."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    (tmp_path / "checkpoint-000001" / "manifest.json").unlink()
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 2
    told = capsys.readouterr()
    first, second = told.out.splitlines()
    assert re.search(r"checkpoint-000001: BROKEN: .*manifest.json: No such file or directory$", first)
    assert second.endswith("; sizes and digests checked")
    assert told.err.endswith(
        "checkpoint-000001: not a checkpoint: manifest.json: No such file or directory\n"
    )


def _overflowing(mesh: Mesh, folder: Path, net: torch.nn.Module, extra: dict[str, Any]) -> None:
    """Three steps, of which the second overflows, then a checkpoint."""
    policy = preset("zero3", memory=ROOMY, loss_scale=parse_loss_scale("dynamic:from4"))
    zero = shard(copy.deepcopy(net), mesh=mesh, policy=policy)
    optimizer = torch.optim.AdamW(zero.param_groups())
    for step in range(3):
        loss = zero.model(batch(step, mesh.rank)).sum()
        zero.scaler.scaled(loss * (math.inf if step == 1 else 1.0)).backward()
        zero.finish_backward()
        assert zero.step(optimizer).done == (step != 1)
        optimizer.zero_grad()
    save(folder, zero, [optimizer], extra=extra)


@pytest.mark.parametrize("extra", [{}, {"seed": 0, "corpus": "c", "sequence": 8, "steps": 3}])
def test_steps_are_counted_as_the_log_of_a_run_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: dict[str, Any]
) -> None:
    """A step that an overflow skipped is one, and is told apart."""
    on_threads(Topology(1, 2), _overflowing, tmp_path, NET, extra)
    assert main(["checkpoints", str(tmp_path)]) == 0
    words = "checkpoint-000001: step 3, of which 1 was skipped for an overflow, "
    assert words in capsys.readouterr().out


def test_a_checkpoint_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest of a folder, in the type asked for; the path is printed."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    out = tmp_path / "out.safetensors"
    assert main(["export", str(tmp_path), str(out), "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.split() == [str(out)]
    state = load_file(out)
    assert state["head.weight"].dtype == torch.bfloat16
    assert state.keys() == NET.state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["checkpoints", "FOLDER/nowhere"], "nowhere: no such folder"),
        (["checkpoints", "FOLDER"], "no checkpoint in it"),
        (
            ["checkpoints", "docs/reference/wire_format.md"],
            "docs/reference/wire_format.md: no such folder",
        ),
        (
            ["export", "docs/reference/wire_format.md", "FOLDER/out"],
            "docs/reference/wire_format.md: no such folder",
        ),
        (["export", "FOLDER", "FOLDER/out"], "no checkpoint in it"),
        (
            ["export", "FOLDER", "FOLDER/out", "--dtype", "int8"],
            "--dtype int8: expected one of fp32, bf16, fp16",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """What is not a checkpoint, or not a type, is said; nothing is written."""
    assert main([one.replace("FOLDER", str(tmp_path)) for one in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_the_documented_program_reads_a_checkpoint(tmp_path: Path) -> None:
    """docs/guide/checkpoints.md, "Reading one without this project", with the format's own library."""
    text = Path("docs/guide/checkpoints.md").read_text(encoding="utf-8").partition("Reading one without")[2]
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(program, found)  # noqa: S102  # our own docs
    on_threads(Topology(3, 1), _saved, tmp_path, ODD)
    state = found["read"](tmp_path / "checkpoint-000002")
    assert state.keys() == ODD.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in ODD.state_dict().items())
