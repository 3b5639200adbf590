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

from impl.checkpoint.save_load import save
from impl.comm.mesh import Mesh
from impl.policy.policy import parse_loss_scale
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.harness.conftest import Zeropp
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


def test_checkpoints_are_listed(tmp_path: Path, zeropp: Zeropp) -> None:
    """A line each, of a folder of them or of one: step, elements, optimizers, bytes, where from."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    lines = zeropp("checkpoints", tmp_path).stdout.splitlines()
    assert len(lines) == 2
    sizes = [parameter.numel() for parameter in NET.parameters()]
    contents = f"{sum(sizes):,} elements in {len(sizes)} parameters, optimizers AdamW"
    assert f"checkpoint-000002: step 0, {contents}" in lines[1]
    assert "in 2 files, from 2x1 ranks at stage 3; zeropp " in lines[1]
    assert zeropp("checkpoints", tmp_path / "checkpoint-000001").stdout.splitlines() == lines[:1]


def test_what_was_checked_is_said(tmp_path: Path, zeropp: Zeropp) -> None:
    """An altered file has its size: a listing says that contents were not checked, and --verify finds it."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    lines = zeropp("checkpoints", tmp_path, "--verify").stdout.splitlines()
    assert all(line.endswith("; sizes and digests checked") for line in lines)
    file = tmp_path / "checkpoint-000001" / "rank-00001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    lines = zeropp("checkpoints", tmp_path).stdout.splitlines()
    assert all(line.endswith("; sizes checked, contents not (--verify)") for line in lines)
    process = zeropp("checkpoints", tmp_path, "--verify", status=2)
    first, second = process.stdout.splitlines()
    message = "rank-00001.safetensors: was altered since it was written: its digest differs; load another checkpoint"
    assert re.search(rf"checkpoint-000001: step 0, .*; BROKEN: .*{message}$", first)
    assert second.endswith("; sizes and digests checked")
    assert process.stderr.endswith(f"{message}\n")
    zeropp("export", tmp_path / "checkpoint-000001", tmp_path / "out", status=2)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "rank-00001.safetensors",
            b"cut",
            r"rank-00001.safetensors: has 3 bytes, but \d+ according to the manifest",
        ),
        ("manifest.json", b"{}", "manifest.json: "),
        ("manifest.json", None, "is not a checkpoint: manifest.json: No such file or directory"),
    ],
)
def test_a_broken_checkpoint_hides_no_other(
    tmp_path: Path, zeropp: Zeropp, file: str, text: bytes | None, message: str
) -> None:
    """Each has a line, one without a manifest too; the error says why, and how many are broken; status 2."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    for broken, count in ((1, ""), (2, r" \(the first of 2 broken checkpoints\)")):
        path = tmp_path / f"checkpoint-00000{broken}" / file
        path.unlink()
        if text is not None:
            path.write_bytes(text)
        process = zeropp("checkpoints", tmp_path, status=2)
        first, _ = process.stdout.splitlines()
        assert re.search(f"checkpoint-000001: .*BROKEN: .*{message}", first)
        assert re.search(f"{message}.*{count}\n$", process.stderr)


def _overflowing(mesh: Mesh, folder: Path, net: torch.nn.Module) -> None:
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
    save(folder, zero, [optimizer], extra={"seed": 0, "corpus": "c", "sequence": 8, "steps": 3})


def test_steps_are_counted_as_the_log_of_a_run_counts_them(tmp_path: Path, zeropp: Zeropp) -> None:
    """A step that an overflow skipped counts, and is counted by itself too."""
    on_threads(Topology(1, 2), _overflowing, tmp_path, NET)
    steps = "checkpoint-000001: step 3, 1 of them skipped for an overflow, "
    assert steps in zeropp("checkpoints", tmp_path).stdout


def test_a_checkpoint_is_exported(tmp_path: Path, zeropp: Zeropp) -> None:
    """The newest of a folder, in the requested type; the path is printed."""
    on_threads(Topology(2, 1), _saved, tmp_path, NET)
    out = tmp_path / "out.safetensors"
    assert zeropp("export", tmp_path, out, "--dtype", "bf16").stdout.split() == [str(out)]
    state = load_file(out)
    assert state["head.weight"].dtype == torch.bfloat16
    assert state.keys() == NET.state_dict().keys()


def test_an_export_that_overflows_is_refused_unless_asked_for(tmp_path: Path, zeropp: Zeropp) -> None:
    """In one line, with status 2 and no file; asked for, standard error says what was lost."""
    net = copy.deepcopy(NET)
    with torch.no_grad():
        net.head.bias[:2] = torch.tensor([1e5, math.inf])
    on_threads(Topology(2, 1), _saved, tmp_path / "run", net)
    arguments = ("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp16")
    (line,) = zeropp(*arguments, status=2).stderr.splitlines()
    assert (
        "finite values overflow fp16, whose largest is 65504: 'head.bias' (1 of 16, largest 100000); " in line
    )
    assert "--allow-overflow" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    process = zeropp(*arguments, "--allow-overflow")
    assert process.stdout.split() == [str(tmp_path / "out")]
    overflow, not_finite = process.stderr.splitlines()
    assert overflow.startswith("note: finite values overflow fp16")
    assert not_finite.startswith(
        "note: values are infinite or NaN, as they were before the cast: 'head.bias'"
    )
    assert load_file(tmp_path / "out")["head.bias"][:2].isinf().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoints", "FOLDER/nowhere"], "nowhere: no such folder"),
        (["checkpoints", "FOLDER"], "no checkpoint in it"),
        (["checkpoints", "docs/reference/wire_format.md"], "docs/reference/wire_format.md: no such folder"),
        (
            ["export", "docs/reference/wire_format.md", "FOLDER/out"],
            "docs/reference/wire_format.md: no such folder",
        ),
        (["export", "FOLDER", "FOLDER/out"], "no checkpoint in it"),
        (
            ["export", "FOLDER", "FOLDER/out", "--dtype", "int8"],
            "'int8' is not one of 'fp32', 'bf16', 'fp16'",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, zeropp: Zeropp, arguments: list[str], message: str
) -> None:
    """A line says what is no checkpoint, or no type; nothing is written."""
    arguments = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]
    (line,) = zeropp(*arguments, status=2).stderr.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_the_documented_program_reads_a_checkpoint(tmp_path: Path) -> None:
    """The program of docs/guide/checkpoints.md, "Reading a checkpoint without this project", reads one."""
    text = (
        Path("docs/guide/checkpoints.md").read_text(encoding="utf-8").partition("## Reading a checkpoint")[2]
    )
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(program, namespace)  # noqa: S102  # our own docs
    on_threads(Topology(3, 1), _saved, tmp_path, ODD)
    state = namespace["read"](tmp_path / "checkpoint-000002")
    assert state.keys() == ODD.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in ODD.state_dict().items())
