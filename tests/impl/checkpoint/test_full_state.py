"""Whole state dicts out of checkpoints and engines, and into engines."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.checkpoint.full_state import consolidated, export, import_
from impl.checkpoint.safetensors_file import Reader
from impl.checkpoint.save_load import CheckpointError, save
from impl.comm.mesh import Mesh
from impl.plan.policy import Policy, preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.support.models import Odd
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY, policies, topologies
from tests.support.training import model

ZEROPP = preset("zeropp", memory=ROOMY)
TIED, ODD = model(tied=True), model(Odd)


class Counting(nn.Module):
    """Extra state of both kinds beside a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = Inner()
        self.seen: Any = (0, None)

    def get_extra_state(self) -> Any:
        """No tensor."""
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        """Take it over."""
        self.seen = state


class Inner(nn.Module):
    """Extra state that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.amax = torch.ones(3)

    def get_extra_state(self) -> Tensor:
        """A tensor."""
        return self.amax

    def set_extra_state(self, state: Tensor) -> None:
        """Take it over, whatever its shape."""
        self.amax = state.clone()


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], value) if isinstance(value, Tensor) else one[name] == value
        for name, value in other.items()
    )


def _saved(mesh: Mesh, folder: Path, policy: Policy, net: nn.Module) -> dict[str, Tensor]:
    zero = shard(copy.deepcopy(net), mesh=mesh, policy=policy)
    save(folder, zero)
    return zero.full_state_dict()


@pytest.mark.parametrize("net", [TIED, ODD], ids=["tied", "odd"])
def test_a_checkpoint_is_a_plain_state_dict(tmp_path: Path, net: nn.Module) -> None:
    """Without ranks or model: the unsharded model loads it strictly, tied weights under both names."""
    state, *_ = on_threads(Topology(2, 2), _saved, tmp_path, ZEROPP, net)
    found = consolidated(tmp_path)
    assert list(found) == list(net.state_dict())
    assert _same(found, state)
    fresh = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(found, strict=True)
    assert _same(fresh.state_dict(), net.state_dict())


def _read(path: Path) -> dict[str, Tensor]:
    reader = Reader(path)
    return {name: reader.read(name).view(entry.shape) for name, entry in reader.entries.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_export_is_the_state_in_one_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """Parameters in the type asked for, buffers in their own; from a checkpoint and from an engine alike."""
    on_threads(Topology(1, 3), _saved, tmp_path, ZEROPP, TIED)
    export(tmp_path, tmp_path / "out", dtype=dtype)
    wanted = {name: value.to(dtype) for name, value in TIED.state_dict().items()}
    wanted["scale"] = TIED.scale
    assert _same(_read(tmp_path / "out"), wanted)
    on_threads(Topology(1, 3), _exported, tmp_path / "engine", dtype, TIED)
    assert _same(_read(tmp_path / "engine"), wanted)


def _exported(mesh: Mesh, path: Path, dtype: torch.dtype, net: nn.Module) -> str:
    zero = shard(copy.deepcopy(net), mesh=mesh, policy=ZEROPP)
    try:
        export(zero, path, dtype=dtype)
    except CheckpointError as error:
        return str(error)
    zero.full_state_dict()  # no rank is out of step
    return ""


def test_an_export_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    """A file that is there, a folder that is not, a type of integers: on all ranks of an engine."""
    (tmp_path / "there").touch()
    for path, dtype, words in [
        (tmp_path / "there", torch.float32, "there: is there already"),
        (tmp_path / "no" / "out", torch.float32, "no such folder"),
        (tmp_path / "out", torch.int8, "dtype torch.int8: expected one of"),
    ]:
        told = on_threads(Topology(1, 2), _exported, path, dtype, TIED)
        assert all(words in line for line in told)
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        export(tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


class Wide(nn.Module):
    """Eight equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))


def test_an_export_streams(tmp_path: Path) -> None:
    """Python's own memory peaks below three of eight tensors, bytes as read and as assembled."""
    on_threads(Topology(1, 1), _saved, tmp_path, preset("exact"), model(Wide))
    tracemalloc.start()
    export(tmp_path, tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 256 * 256 * 4


def test_extra_states_go_through_files(tmp_path: Path) -> None:
    """Those that are no tensors travel in the file's header, those that are as tensors of any shape."""
    net = model(Counting)
    net.seen, net.inner.amax = (7, {"a": 0.5}), torch.arange(5.0)
    on_threads(Topology(1, 2), _saved, tmp_path, ZEROPP, net)
    assert consolidated(tmp_path)["_extra_state"] == net.seen
    export(tmp_path, tmp_path / "out")
    fresh = model(Counting)
    for seen, amax in on_threads(Topology(1, 2), _imported_extra, tmp_path / "out", fresh):
        assert seen == net.seen
        assert torch.equal(amax, net.inner.amax)


def _imported_extra(mesh: Mesh, path: Path, net: nn.Module) -> tuple[Any, Tensor]:
    zero = shard(copy.deepcopy(net), mesh=mesh, policy=ZEROPP)
    import_(path, zero)
    return zero.model.seen, zero.model.inner.amax


# Into engines


def _imported(mesh: Mesh, policy: Policy, source: Any, net: nn.Module) -> dict[str, Tensor]:
    net = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    zero = shard(net, mesh=mesh, policy=policy)
    import_(source, zero)
    return zero.full_state_dict()


@given(topologies(6).flatmap(lambda t: st.tuples(st.just(t), policies(t))))
@settings(max_examples=15)
def test_a_state_dict_is_imported_under_any_policy(drawn: tuple[Topology, Policy]) -> None:
    """Each rank takes its own ranges; together they are what was given."""
    topology, policy = drawn
    state = ODD.state_dict()
    for found in on_threads(topology, _imported, replace(policy, frozen=None), state, ODD):
        assert _same(found, state)


def test_a_file_is_imported_and_one_name_of_tied_weights_is_enough(tmp_path: Path) -> None:
    """As files of other programs have it; 16 bits become masters of 32."""
    on_threads(Topology(1, 1), _saved, tmp_path, ZEROPP, TIED)
    export(tmp_path, tmp_path / "out", dtype=torch.bfloat16)
    wanted = {name: value.bfloat16().float() for name, value in TIED.state_dict().items()}
    alone = {name: value for name, value in wanted.items() if name != "embed.weight"}
    for source in (tmp_path / "out", alone):
        for found in on_threads(Topology(2, 2), _imported, ZEROPP, source, TIED):
            assert _same(found, wanted)


def _refused(mesh: Mesh, source: Any, net: nn.Module) -> str:
    zero = shard(copy.deepcopy(net), mesh=mesh, policy=ZEROPP)
    before = zero.full_state_dict()
    try:
        import_(source if mesh.rank else net.state_dict(), zero)
    except CheckpointError as error:
        assert _same(zero.full_state_dict(), before)
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"head.bias": None},
            r"rank 1: 1 entries of the state dict differ, first 'head.bias', only in the model",
        ),
        ({"more": torch.ones(1)}, r"rank 1: .* first 'more', not in the model"),
        ({"head.bias": torch.ones(3)}, r"rank 1: 'head.bias' is \(3,\) in it, \(16,\) in the model"),
        (
            {"head.weight": None, "embed.weight": None},
            r"2 entries .* first 'embed.weight', only in the model",
        ),
    ],
)
def test_a_state_of_another_model_is_refused_by_all_ranks(change: dict[str, Any], words: str) -> None:
    """One line on all ranks, also on those whose own state fits, and nothing has changed."""
    given_ = {name: value for name, value in {**TIED.state_dict(), **change}.items() if value is not None}
    (told,) = set(on_threads(Topology(1, 2), _refused, given_, TIED))
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(told)
