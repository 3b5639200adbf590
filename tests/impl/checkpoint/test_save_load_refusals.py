"""Checkpoints that cannot be loaded or saved are refused by all ranks alike, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from impl.checkpoint.commit import MANIFEST, checkpoints
from impl.checkpoint.save_load import MESSAGE_BYTES, CheckpointError, latest, load, save, together
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.policy.topology import Topology
from tests.impl.checkpoint.checkpointed import NET, Run, same, written
from tests.support.models import Net
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT
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


SPOILT: dict[str, Callable[[Path], object]] = {  # by its error
    r"rank-00002.safetensors: cannot be read: No such file": lambda file: file.unlink(),
    r"rank-00002.safetensors: has \d+ bytes, but \d+ according to the manifest": lambda file: (
        file.write_bytes(file.read_bytes()[:-1])
    ),
    "rank-00002.safetensors: was altered since it was written": lambda file: file.write_bytes(
        file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])
    ),
    "is not a checkpoint: manifest.json: No such file": lambda file: (file.parent / MANIFEST).unlink(),
}


@pytest.mark.parametrize("message", SPOILT)
def test_broken_checkpoints_are_refused_by_all_ranks(tmp_path: Path, message: str) -> None:
    """Missing, truncated and altered files give one line on every rank, and nothing is changed."""
    on_threads(Topology(2, 2), written, tmp_path, EXACT, NET)
    path = latest(tmp_path)
    SPOILT[message](path / "rank-00002.safetensors")
    (refusal,) = set(on_threads(Topology(1, 4), _refused, path, NET, torch.optim.AdamW, 1))
    assert re.search(message, refusal)
    assert "\n" not in refusal


class More(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.ones(2))


class Fewer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([0.5])


@pytest.mark.parametrize(
    ("net", "optimizer", "count", "message"),
    [
        (model(hidden=24), torch.optim.AdamW, 1,
         r"'blocks.0.up.weight' is {.* 'shape': \[40, 16\]} in the checkpoint, but {.*\[24, 16\]} in the model"),
        (model(depth=2), torch.optim.AdamW, 1,
         r"entries of the state dict \(differences: 5\), for example 'blocks.2.down.weight', which is only in"),
        (model(Fewer), torch.optim.AdamW, 1,
         r"'scale' is {'buffer': 'float32', 'shape': \[\]} in the checkpoint, but {.*\[1\]} in"),
        (model(More), torch.optim.AdamW, 1,
         r"entries of the state dict \(differences: 1\), for example 'more', which is only in the model"),
        (model(tied=True), torch.optim.AdamW, 1,
         "'head.weight' is {'parameter': 'head.weight', .*} in the checkpoint, but {.* 'embed.weight', .*} in the"),
        (NET, torch.optim.Adagrad, 1, "has the state of AdamW for optimizer 0, which is Adagrad"),
        (NET, torch.optim.AdamW, 2, "optimizer 1 holds a master of this engine that is already held"),
    ],
    ids=["shape", "names", "buffer", "a buffer more", "tied", "kind", "twice"],
)  # fmt: skip
def test_checkpoints_of_others_are_refused(
    tmp_path: Path, net: nn.Module, optimizer: Any, count: int, message: str
) -> None:
    """Other shapes, names, buffers or optimizers give one line that names the first difference."""
    on_threads(Topology(1, 2), written, tmp_path, EXACT, NET)
    (refusal,) = set(on_threads(Topology(1, 2), _refused, tmp_path, net, optimizer, count))
    assert re.search(message, refusal)


def _passed(run: Run) -> None:
    run.net(batch(0, run.mesh.rank)).backward()


def _of_others(run: Run) -> None:
    run.optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)]


def _another_rate(run: Run) -> None:
    run.optimizers[0].param_groups[0]["lr"] = 0.1 + run.mesh.rank


def _factored(run: Run) -> None:
    master = run.optimizers[0].param_groups[0]["params"][0]
    run.optimizers[0].state[master]["factor"] = torch.ones(3)


def _attached(run: Run) -> None:
    if run.mesh.rank == 1:
        run.net.adapter = nn.Linear(2, 2)


def _nothing(_: Run) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (_nothing, lambda rank: {"extra": {"tensor": torch.ones(1)} if rank else None},
         r"rank 1: extra\['tensor'\]: a value of type Tensor cannot be saved"),
        (_nothing, lambda rank: {"extra": rank // 2},
         "rank 2 passes another value of extra=, or other optimizer options, than rank 0"),
        (_another_rate, None, "rank 1 passes another value of extra=, or other optimizer options"),
        (_passed, None, r"save\(\) was called, but no optimizer has used the gradients of \d+ of the masters"),
        (_of_others, None, "optimizer 0 holds a tensor that is not a master of this engine"),
        (_factored, None, "state 'factor' has 3 elements for a master of"),
        (_attached, None, "rank 1: parameter 'adapter.weight' was added to the model after it was sharded"),
        (_nothing, lambda _: {"keep": 0}, "keep = 0: expected 1 or more"),
    ],
)  # fmt: skip
@each_rank(2, 2)
def test_what_cannot_be_saved_is_refused_by_all_ranks(
    mesh: Mesh, tmp_path: Path, *, spoil: Callable[[Run], None], options: Any, message: str
) -> None:
    """Every rank raises one line, whichever rank is at fault, and no checkpoint is left."""
    run = Run(mesh, EXACT, NET)
    spoil(run)
    with pytest.raises(CheckpointError, match=message):
        run.save(tmp_path, **(options(mesh.rank) if options else {}))
    assert checkpoints(tmp_path) == []


@each_rank(1, 2)
def test_weights_can_be_loaded_without_optimizers(mesh: Mesh, tmp_path: Path) -> None:
    """The result says that the optimizers' state was dropped; loading a state that was not saved is refused."""
    written(mesh, tmp_path, EXACT, NET)
    run = Run(mesh, EXACT, NET)
    assert load(tmp_path, run.zero).dropped == (
        "states of optimizers (number saved: 1): load() was given no optimizers",
    )
    save(tmp_path, run.zero)
    with pytest.raises(
        CheckpointError, match=r"the number of saved optimizers is 0, but load\(\) was given 1"
    ):
        run.load(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "nowhere", run.zero)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: File exists"):
        run.save(tmp_path / "file")
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        load(tmp_path / "empty", run.zero)


WORLD = Topology(1, 3)


def _attempted(mesh: Mesh, errors: dict[int, Exception]) -> list[Any] | str:
    wire = Wire(mesh)

    def attempt() -> tuple[None, int]:
        if mesh.rank in errors:
            raise errors[mesh.rank]
        return None, mesh.rank * 2

    try:
        return together(wire, attempt)[1]
    except CheckpointError as error:
        return str(error)
    finally:
        reports = together(wire, lambda: (None, None))[1]
        assert reports == [None] * mesh.topology.world  # all are still in step


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        ({1: CheckpointError("no\nroom")}, "rank 1: no room"),
        ({2: KeyError("x"), 1: ValueError("y")}, "rank 1: ValueError: y"),  # the first rank's
        ({1: OSError(28, "No space left", "/disk/file")}, "rank 1: /disk/file: No space left"),
        (dict.fromkeys(range(3), CheckpointError("gone")), "gone"),
        ({2: ZeroError("not a step")}, "rank 2: not a step"),
        ({}, [0, 2, 4]),
    ],
)
def test_an_error_of_one_is_an_error_of_all(errors: dict[int, Exception], outcome: object) -> None:
    """All ranks raise the first failing rank's error in one line, with its number unless all errors are equal."""
    assert on_threads(WORLD, _attempted, errors) == [outcome] * 3


@given(st.text(min_size=1, max_size=3000))
def test_any_error_fits_the_message(text: str) -> None:
    """An error of any length and with any letters is cut to the bytes of a message."""
    (message,) = on_threads(Topology(1, 1), _attempted, {0: CheckpointError(text)})
    assert len(message) <= MESSAGE_BYTES
