"""Tests of calls that only some ranks make: every rank soon reads which call it was, and who made it."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn

from impl.checkpoint.save_load import load, save
from impl.comm import watchdog
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.engine.engine import Zero
from impl.errors import ZeroError
from impl.parameters.gathered import GatheredParameters
from impl.parameters.init import Init
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.quantized_collectives import quantized_all_gather, quantized_reduce_scatter
from impl.zero import shard
from tests.support.strategies import ROOMY

SECONDS: Final = 1.0  # the wire's timeout once all ranks are ready


def _gathered(zero: Zero, _: str) -> None:
    with GatheredParameters(list(zero.model.parameters())):
        pass


def _unsharded(zero: Zero, _: str) -> None:
    with zero.unsharded():
        zero.model.weight.sum()


def _rehearse(zero: Zero, _: str) -> None:
    with zero.rehearsing():
        _train(zero, _)


def _train(zero: Zero, _: str) -> None:
    zero.model(torch.ones(2, 6)).sum().backward()


def _clipped_step(zero: Zero, _: str) -> None:
    zero.step(torch.optim.SGD(zero.param_groups(), lr=0.1), max_norm=1.0)


def _start(zero: Zero, _: str) -> None:
    shard(nn.Linear(4, 4), mesh=zero.wire.mesh, policy=zero.policy, wire=zero.wire)


def _cut(zero: Zero, _: str) -> None:
    with Init(mesh=zero.wire.mesh, policy=zero.policy, wire=zero.wire, blocks=nn.Linear):
        nn.Linear(4, 4).weight.sum()  # was cut, and is gathered


CALLS: Final[dict[str, Callable[[Zero, str], Any]]] = {
    "save()": lambda zero, folder: save(folder, zero),
    "load()": lambda zero, folder: load(folder, zero),
    "grad_norm()": lambda zero, _: zero.grad_norm(),
    "clip_grad_norm_()": lambda zero, _: zero.clip_grad_norm_(1.0),
    "step()": _clipped_step,
    "full_state_dict()": lambda zero, _: zero.full_state_dict(),
    "GatheredParameters": _gathered,
    "unsharded()": _unsharded,
    "rehearsing()": _rehearse,
    "check_order()": lambda zero, _: zero.wire.check_order(),
    "quantized_all_gather()": lambda zero, _: quantized_all_gather(
        torch.ones(8), "int8:8", zero.wire.mesh, wire=zero.wire
    ),
    "quantized_reduce_scatter()": lambda zero, _: quantized_reduce_scatter(
        torch.ones(6), "int8:8", zero.wire.mesh, wire=zero.wire
    ),
    "shard()": _start,
    "Init": _cut,
}


def _other_call(call: str) -> str:
    return "full_state_dict()" if call == "grad_norm()" else "grad_norm()"


def _body(mesh: Mesh, case: tuple[str, Sequence[int], str, str]) -> str:
    """Return the error that this rank raises, or what it did without an error."""
    call, callers, others_do, transport = case
    wire = Wire(mesh, transport=transport, timeout=60)
    zero = shard(nn.Linear(6, 6), mesh=mesh, policy=preset("exact", memory=ROOMY), wire=wire)
    wire.meet("the start of the test")
    watchdog._PATIENCE_SECONDS = 1.5  # type: ignore[misc]  # this process is an entry point
    wire._timeout = SECONDS
    with tempfile.TemporaryDirectory() as folder:
        try:
            if others_do == "exit after the first":
                with wire.calling("twice()"):
                    zero.grad_norm()
                    if mesh.rank not in callers:
                        os._exit(0)
                    zero.grad_norm()
            elif mesh.rank in callers:
                CALLS[call](zero, folder)
            elif others_do == "train":
                _train(zero, folder)
            elif others_do == "make another call":
                CALLS[_other_call(call)](zero, folder)
            elif others_do == "come late":
                time.sleep(SECONDS + 3)
                CALLS[call](zero, folder)
            elif others_do == "are interrupted":
                list(zero.model(torch.ones(2, 7)))  # another shape
            else:
                os._exit(0)
        except (RuntimeError, ZeroError) as error:
            return f"{type(error).__name__}: {error}"
    return "returned"


def _ended(folder: Path, world: int, case: tuple[str, Sequence[int], str, str]) -> dict[int, str]:
    """Return the texts of the ranks, which must all exit by themselves; a rank that hangs for a minute has none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "impl.zero"])
    ranks = [
        context.Process(target=_rank, args=(rank, world, str(folder), case), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + 60
        for process in ranks:
            process.join(deadline - time.monotonic())
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return {int(path.stem): path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}


def _rank(rank: int, world: int, folder: str, case: tuple[str, Sequence[int], str, str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this process is an entry point
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    text = _body(Mesh.create(Topology(1, world)), case)
    Path(folder, f"{rank}.txt").write_text(text, encoding="utf-8")
    time.sleep(1)  # gloo tells the others at once if it goes, while they may still write their reports
    os._exit(0)  # the groups of failed exchanges are not ended


def _texts(case: tuple[str, Sequence[int], str, str], world: int) -> dict[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        return _ended(Path(folder), world, case)


def _words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} and {ranks[1]}"


def check(
    call: str, callers: Sequence[int], others_do: str, world: int = 2, transport: str = "backend"
) -> None:
    """Run the case, and check that the errors of callers and others name the call and the ranks."""
    texts = _texts((call, callers, others_do, transport), world)
    others = [rank for rank in range(world) if rank not in callers]
    line = f"all ranks must call {call}: {_words(callers)} did, {_words(others)} did not"
    for rank in callers:
        first, *rest = texts[rank].splitlines()
        # Shared memory shows at once that the ranks' messages differ.
        verb = "(could not finish|found that the ranks' exchanges differ)"
        assert re.match(f"WireError: rank {rank} {verb}", first), texts
        assert f"in {call}" in first, texts
        assert line in rest, texts
    for rank in others:
        if others_do == "train":
            assert line in texts[rank].splitlines(), texts
        elif others_do == "make another call":
            assert line in texts[rank].splitlines(), texts
            assert f"all ranks must call {_other_call(call)}: {_words(others)} did" in texts[rank], texts
        elif others_do == "come late":
            assert texts[rank].startswith("WireError: "), texts


@pytest.mark.parametrize("others_do", ["train", "exit"])
@pytest.mark.parametrize("call", ["save()", "grad_norm()"])
def test_a_call_on_rank_0_alone_is_named(call: str, others_do: str) -> None:
    """If rank 1 trains on, both ranks read the error; if it has exited, rank 0 does."""
    check(call, [0], others_do)


@pytest.mark.long
@pytest.mark.parametrize(("caller", "others_do"), [(0, "train"), (1, "make another call")])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_on_one_rank_alone_is_named(call: str, caller: int, others_do: str) -> None:
    """The error names any call, whether the other rank trains on or makes another call."""
    check(call, [caller], others_do)


@pytest.mark.long
@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("others_do", ["train", "make another call", "come late", "are interrupted", "exit"])
@pytest.mark.parametrize("call", ["save()", "grad_norm()"])
def test_whatever_the_other_rank_does_the_call_is_named(call: str, others_do: str, caller: int) -> None:
    """The call is named on either rank, whatever the other one does."""
    check(call, [caller], others_do)


def test_a_rank_lost_in_a_call_has_made_it() -> None:
    """If the first exchange of the call has arrived, the error blames no rank for a missing call."""
    (text,) = _texts(("grad_norm() twice", [0], "exit after the first", "backend"), 2).values()
    assert "for step control in twice()" in text.splitlines()[0]
    assert "rank 1: did not report" in text
    assert "all ranks must call" not in text


@pytest.mark.long
@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("callers", [(0,), (1, 2)], ids=str)
@pytest.mark.parametrize(
    "call", ["save()", "clip_grad_norm_()", "full_state_dict()", "quantized_all_gather()"]
)
def test_of_three_ranks_those_that_called_are_named(
    call: str, callers: Sequence[int], transport: str
) -> None:
    """With three ranks, one or two of which call, the error names the callers."""
    check(call, list(callers), "train", world=3, transport=transport)
