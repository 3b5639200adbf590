"""Tests of full state dicts that are loaded into a sharded model or taken from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.plan.topology import Topology
from impl.zero import Zero, shard
from tests.support.models import Net
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT
from tests.support.training import batch, model

NAME = "blocks.1.up.weight"
NEW = torch.arange(640.0).view(40, 16)


def made(mesh: Mesh, **options: Any) -> tuple[Any, Zero]:
    net = model(Net, **options)
    net.register_buffer("count", torch.tensor([3]))
    return net, shard(net, mesh=mesh, policy=EXACT)


# What is given as a weight (40, 16), and its values.
TAKEN: dict[str, tuple[Any, Tensor]] = {
    "transposed": (NEW.t().contiguous().t(), NEW),
    "every second": (NEW.repeat_interleave(2, dim=1)[:, ::2], NEW),
    "expanded": (NEW[:1].expand(40, 16), NEW[:1].repeat(40, 1)),
    "a parameter": (nn.Parameter(NEW), NEW),
    "fp64": (NEW.double() / 3, (NEW.double() / 3).float()),
    "bf16": (NEW.bfloat16(), NEW.bfloat16().float()),
    "fp8": (NEW.clamp(max=100).to(torch.float8_e5m2), NEW.clamp(max=100).to(torch.float8_e5m2).float()),
    "infinite": (NEW / 0, NEW / 0),
    "int64": (NEW.long(), NEW),
}


@pytest.mark.parametrize("kind", TAKEN)
@each_rank(2, 2)
def test_a_state_is_taken_in_any_strides_and_floating_type(mesh: Mesh, kind: str) -> None:
    """Both calls that load convert the values to fp32 masters on all ranks."""
    net, zero = made(mesh)
    given, wanted = TAKEN[kind]
    for load in (zero.load_full_state_dict, net.load_state_dict):
        before = zero.full_state_dict()
        load({**before, NAME: given})
        after = zero.full_state_dict()
        assert torch.equal(after[NAME].nan_to_num(), wanted.nan_to_num())
        assert all(torch.equal(after[name], value) for name, value in before.items() if name != NAME)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "another shape": (NAME, NEW.t(), r"has shape \(16, 40\), expected \(40, 16\)"),
    "int8 codes": (NAME, NEW.to(torch.int8), "is int8, expected float32: convert it first"),
    "large integers": (NAME, NEW.long() + (1 << 30), "is int64, expected float32: convert it first"),
    "bools": (NAME, NEW > 1, "is bool, expected float32"),
    "complex": (NAME, NEW * 1j, "is torch.complex64, but the model's tensor is real: load value.real"),
    "meta": (NAME, NEW.to("meta"), "is on the meta device, expected a dense tensor with values"),
    "sparse": (NAME, NEW.to_sparse(), "is sparse_coo, expected a dense tensor with values"),
    "numpy": (NAME, NEW.numpy(), "is a ndarray, expected a tensor"),
    "nothing": (NAME, None, "is a NoneType, expected a tensor"),
    "fp64 beyond fp32": (
        NAME,
        NEW.double() * 1e38,
        r"overflow fp32, .*: 'blocks.1.up.weight' \(636 of 640, ",
    ),
    "a broadcast buffer": ("count", torch.tensor(3), r"has shape \(\), expected \(1,\)"),
    "a buffer of large integers": ("scale", torch.tensor((1 << 24) + 1), "is int64, expected float32"),
    "a rounded buffer": ("count", torch.tensor([2.5]), "is float32, expected int64: convert it first"),
    "a buffer of NaN": ("count", torch.tensor([torch.nan]), "is float32, expected int64"),
    "a complex buffer": ("scale", torch.tensor(1j), "is torch.complex64, but the model's"),
    "a buffer beyond fp32": ("scale", torch.tensor(1e300, dtype=torch.float64), "overflow fp32, .*: 'scale'"),
}


@pytest.mark.parametrize("kind", REFUSED)
@each_rank(2, 2)
def test_a_state_that_would_change_is_refused_before_anything_is_changed(mesh: Mesh, kind: str) -> None:
    """All ranks refuse it in one line that names the entry, whether or not they hold a part of it."""
    net, zero = made(mesh)
    name, value, message = REFUSED[kind]
    before = zero.full_state_dict()
    state = {key: entry + 1 for key, entry in before.items()} | {name: value}
    for load in (zero.load_full_state_dict, net.load_state_dict):
        with pytest.raises(ZeroError, match=message) as refused:
            load(state)
        assert f"{name!r}" in str(refused.value)
    after = zero.full_state_dict()
    assert all(torch.equal(after[key], entry) for key, entry in before.items())
    exact = {"count": torch.tensor([4.0]), "scale": torch.tensor(2)}  # other types with the same values
    zero.load_full_state_dict({**before, **exact})
    assert zero.full_state_dict()["count"].tolist() == [4]
    assert zero.full_state_dict()["scale"] == 2


@each_rank(1, 2)
def test_tied_parameters_must_have_one_value(mesh: Mesh) -> None:
    """One of the names is enough; two different values are refused, since one of them would be lost."""
    net, zero = made(mesh, tied=True)
    before = zero.full_state_dict()
    apart = {**before, "head.weight": before["head.weight"] + 1}
    for load in (zero.load_full_state_dict, net.load_state_dict):
        with pytest.raises(ZeroError, match=r"'embed.weight' differs from 'head.weight', but the model ties"):
            load(apart)
    assert torch.equal(zero.full_state_dict()["embed.weight"], before["embed.weight"])
    nan = torch.full((16, 16), torch.nan)
    for given in ({"embed.weight": nan, "head.weight": nan.clone()}, {"head.weight": nan}):
        rest = {key: value for key, value in before.items() if key not in ("embed.weight", "head.weight")}
        zero.load_full_state_dict({**rest, **given})
        assert zero.full_state_dict()["embed.weight"].isnan().all()
        zero.load_full_state_dict(before)


def _replaces(net: Any) -> None:
    net.head.weight = nn.Parameter(torch.zeros(16, 16))


def _adds(net: Any) -> None:
    net.adapter = nn.Linear(2, 2)


def _replaces_a_module(net: Any) -> None:
    net.head = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replaces, "'head.weight' was replaced by another object in its module after the model was sharded"),
        (_adds, "'adapter.weight' was added to the model after it was sharded"),
        (_replaces_a_module, "'head.weight' was added to the model after it was sharded"),
    ],
)
@each_rank(1, 2)
def test_a_parameter_of_no_engine_is_in_no_state(
    mesh: Mesh, change: Callable[[Any], None], message: str
) -> None:
    """A model with a parameter added after shard() gives no state and takes none, since ranks differ in it."""
    net, zero = made(mesh)
    state = zero.full_state_dict()
    change(net)
    for call in (zero.full_state_dict, lambda: zero.load_full_state_dict(state), lambda: net(batch(0, 0))):
        with pytest.raises(ZeroError, match=message):
            call()


@pytest.mark.parametrize("ranks", [1, 3])
def test_buffers_of_any_types_are_side_by_side(ranks: int) -> None:
    """Buffers of several types share a message: an int64 buffer may follow 12 bytes of others."""

    def state(mesh: Mesh) -> dict[str, Tensor]:
        net = nn.Linear(2, 2)
        net.register_buffer("three", torch.arange(3.0))
        net.register_buffer("flag", torch.tensor(True))
        net.register_buffer("wide", torch.tensor([1 << 40]))
        net.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
        zero = shard(net, mesh=mesh, policy=EXACT)
        zero.load_full_state_dict({**zero.full_state_dict(), "turns": torch.ones(2)})
        return zero.full_state_dict()

    for found in on_threads(Topology(1, ranks), state):
        assert found["three"].tolist() == [0, 1, 2]
        assert found["flag"].item() is True
        assert found["wide"].item() == 1 << 40
        assert found["turns"].tolist() == [1 + 0j, 1 + 0j]


class Masked(nn.Module):
    """A model with a buffer that is one value, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(1).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.mask).sum()


@each_rank(1, 2)
def test_expanded_buffers_are_loaded_if_their_values_are_equal(mesh: Mesh) -> None:
    """An expanded buffer takes equal values; a state with different values is refused and changes nothing."""
    zero = shard(model(Masked), mesh=mesh, policy=EXACT)
    state = zero.full_state_dict()
    zero.load_full_state_dict({**state, "mask": torch.full((8,), 2.0)})
    assert zero.full_state_dict()["mask"].tolist() == [2.0] * 8
    changed = {**state, "linear.weight": state["linear.weight"] + 1, "mask": torch.arange(8.0)}
    with pytest.raises(ZeroError, match="'mask' has 8 different values along dimension 0"):
        zero.load_full_state_dict(changed)
    assert torch.equal(zero.full_state_dict()["linear.weight"], state["linear.weight"])
    zero.model(torch.ones(2, 8)).backward()  # and it is sent to the other ranks
