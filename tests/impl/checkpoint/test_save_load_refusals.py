"""Checkpoints that cannot be loaded, or saved, are refused by all ranks alike, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from impl.checkpoint.commit import MANIFEST, checkpoints
from impl.checkpoint.save_load import CheckpointError, latest, load, save
from impl.comm.mesh import Mesh
from impl.plan.topology import Topology
from tests.impl.checkpoint.checkpointed import (
    EXACT,
    NET,
    Run,
    same,
    written,
)
from tests.support.models import Net
from tests.support.ranks import on_threads
from tests.support.training import batch, model


def _refused(mesh: Mesh, folder: Path, net: nn.Module, optimizer: Any, count: int) -> str:
    run = Run(mesh, EXACT, net, optimizer=optimizer)
    before = run.zero.full_state_dict()
    try:
        load(folder, run.zero, run.optimizers * count)
    except CheckpointError as error:
        assert same(run.zero.full_state_dict(), before)  # and no rank is out of step
        return str(error)
    return "accepted"


def _spoil(path: Path, how: str) -> None:
    """Make a checkpoint wrong in one way."""
    manifest, file = path / MANIFEST, path / "rank-00002.safetensors"
    held = json.loads(manifest.read_text())
    data = bytearray(file.read_bytes())
    match how:
        case "missing":
            file.unlink()
        case "short":
            file.write_bytes(data[:-1])
        case "flipped":
            data[-1] ^= 1
            file.write_bytes(data)
        case "gone":
            manifest.unlink()
        case "cut":
            manifest.write_text(manifest.read_text()[:-9])
        case "foreign":
            manifest.write_text('{"format": "pt"}')
        case "newer":
            manifest.write_text(json.dumps({**held, "version": 3}))
        case "altered":
            manifest.write_text(json.dumps({**held, "step": 7}))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", r"rank-00002.safetensors: No such file"),
        ("short", r"rank-00002.safetensors: \d+ bytes, the manifest says \d+"),
        ("flipped", "rank-00002.safetensors: altered since it was written"),
        ("gone", "not a checkpoint: manifest.json: No such file"),
        ("cut", "manifest.json: cut short, or not JSON"),
        ("foreign", "not a manifest of a zeropp checkpoint"),
        ("newer", "version 3 of the format; this program reads version 2"),
        ("altered", "manifest.json: altered since it was written"),
    ],
)
def test_broken_checkpoints_are_refused_by_all_ranks(tmp_path: Path, how: str, words: str) -> None:
    """Missing, truncated, altered, foreign, newer: one line on every rank, and nothing has changed."""
    on_threads(Topology(2, 2), written, tmp_path, EXACT, NET, 16)
    path = latest(tmp_path)
    assert path is not None
    _spoil(path, how)
    told = on_threads(Topology(1, 4), _refused, path, NET, torch.optim.AdamW, 1)
    assert len(set(told)) == 1
    assert "\n" not in told[0]
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(told[0])


class Fewer(Net):
    """A buffer of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([0.5])


@pytest.mark.parametrize(
    ("net", "optimizer", "count", "words"),
    [
        (
            model(hidden=24),
            torch.optim.AdamW,
            1,
            r"'blocks.0.up.weight' is {.* 'shape': \[40, 16\]} in it, {.*\[24, 16\]} in the model",
        ),
        (
            model(depth=2),
            torch.optim.AdamW,
            1,
            "5 entries of the state dict differ, first 'blocks.2.down.weight', not in the model",
        ),
        (
            model(Fewer),
            torch.optim.AdamW,
            1,
            r"'scale' is {'buffer': 'float32', 'shape': \[\]} in it, {.*\[1\]} in",
        ),
        (NET, torch.optim.Adagrad, 1, "optimizer 0 is Adagrad, it holds the state of AdamW"),
        (NET, torch.optim.AdamW, 2, "optimizer 1 holds a master that is held twice"),
    ],
    ids=["shape", "names", "buffer", "kind", "twice"],
)
def test_checkpoints_of_others_are_refused(
    tmp_path: Path, net: nn.Module, optimizer: Any, count: int, words: str
) -> None:
    """Other shapes, names, buffers or optimizers: one line that names the first."""
    on_threads(Topology(1, 2), written, tmp_path, EXACT, NET, 16)
    (told,) = set(on_threads(Topology(1, 2), _refused, tmp_path, net, optimizer, count))
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(told)


def _bad_save(mesh: Mesh, folder: Path, how: str) -> str:
    run = Run(mesh, EXACT, NET)
    extra: Any = None
    options: dict[str, Any] = {}
    match how:
        case "extra":
            extra = {"tensor": torch.ones(1)} if mesh.rank else None
        case "differ":
            extra = mesh.rank // 2
        case "lr":
            run.optimizers[0].param_groups[0]["lr"] = 0.1 + mesh.rank
        case "gradients":
            run.net(batch(0, mesh.rank)).backward()
            run.zero.finish_backward()
        case "half":
            masters = run.zero.param_groups()[0]["params"]
            run.optimizers = [torch.optim.SGD(masters[:1], lr=0.1), torch.optim.SGD(masters[1:], lr=0.1)]
            run.net(batch(0, mesh.rank)).backward()
            run.zero.finish_backward()
            run.optimizers[0].step()
        case "foreign":
            run.optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)]
        case "shape":
            master = run.optimizers[0].param_groups[0]["params"][0]
            run.optimizers[0].state[master]["factor"] = torch.ones(3)
        case "keep":
            options = {"keep": 0}
        case "folder":
            folder.joinpath("file").touch()
            folder = folder / "file"
    try:
        save(folder, run.zero, run.optimizers, extra=extra, **options)
    except CheckpointError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("extra", r"rank 1: extra\['tensor'\]: Tensor cannot be written as JSON"),
        ("differ", "rank 2 would save another extra, or options of optimizers, than rank 0"),
        ("lr", "rank 1 would save another extra, or options of optimizers"),
        ("gradients", "save\\(\\) with gradients that no optimizer has used, of \\d+ masters"),
        ("half", "save\\(\\) with gradients that no optimizer has used, of \\d+ masters"),
        ("foreign", "optimizer 0 holds what is no master of this engine"),
        ("shape", "state 'factor' has 3 elements for a master of"),
        ("keep", "keep = 0: expected 1 or more"),
        ("folder", "file: File exists"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_all_ranks(tmp_path: Path, how: str, words: str) -> None:
    """One line on every rank, wherever the fault is, and no checkpoint."""
    (told,) = set(on_threads(Topology(2, 2), _bad_save, tmp_path, how))
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(told)
    assert checkpoints(tmp_path) == []


def _no_optimizer(mesh: Mesh, folder: Path) -> tuple[str, ...]:
    run = Run(mesh, EXACT, NET)
    dropped = load(folder, run.zero).dropped
    save(folder, run.zero)
    with pytest.raises(CheckpointError, match="it holds 0 optimizers, 1 are to be loaded"):
        load(folder, run.zero, run.optimizers)
    with pytest.raises(CheckpointError, match="no such folder"):
        load(folder / "nowhere", run.zero)
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        load(folder / "empty", run.zero)
    return dropped


def test_weights_can_be_loaded_without_optimizers(tmp_path: Path) -> None:
    """It is said that the optimizers' state was left; the other way round is refused."""
    on_threads(Topology(1, 2), written, tmp_path, EXACT, NET, 16)
    (dropped,) = set(on_threads(Topology(1, 2), _no_optimizer, tmp_path))
    assert dropped == ("state of 1 optimizers: not asked for",)
