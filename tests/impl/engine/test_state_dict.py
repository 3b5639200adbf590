"""Tests of full state dicts that are loaded into a sharded model or taken from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.parameters.gathered import GatheredParameters
from impl.policy.topology import Topology
from impl.unit.whole_values import WholeValues
from impl.zero import Zero, full_state_dict, load_full_state_dict, shard
from tests.support.models import Net
from tests.support.ranks import each_rank, on_processes, on_threads
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
    "int8 codes": (NAME, NEW.to(torch.int8), "is int8, expected float32: convert it to float32"),
    "large integers": (NAME, NEW.long() + (1 << 30), "is int64, expected float32: convert it to float32"),
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
    "a rounded buffer": ("count", torch.tensor([2.5]), "is float32, expected int64: convert it to int64"),
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
    with pytest.raises(ZeroError, match="'mask' has unequal values along dimension 0"):
        zero.load_full_state_dict(changed)
    assert torch.equal(zero.full_state_dict()["linear.weight"], state["linear.weight"])
    zero.model(torch.ones(2, 8)).backward()  # and it is sent to the other ranks


# One rank's state, and memory


def same(state: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two state dicts have the same names in the same order, with the same values."""
    return [*state] == [*wanted] and all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}], ids=str)
def test_a_state_for_rank_0_is_empty_elsewhere(options: dict[str, Any]) -> None:
    """Rank 0 gets what all ranks get otherwise; the function that takes the model does the same as the method."""

    def states(mesh: Mesh) -> tuple[Any, ...]:
        net, zero = made(mesh, tied=True)
        of_model = full_state_dict(net, rank0_only=True, device=None, **options)
        return zero.full_state_dict(**options), zero.full_state_dict(rank0_only=True, **options), of_model

    for rank, (every, first, of_model) in enumerate(on_threads(Topology(2, 2), states)):
        for state in (first, of_model):
            assert same(state, {} if rank else every)
        assert all(value.device.type == "cpu" for value in every.values())


@each_rank(1, 2)
def test_all_ranks_refuse_values_of_which_only_rank_0_gets_a_state(mesh: Mesh) -> None:
    """Values that overflow are an error on every rank, so that no rank goes on alone."""
    net, zero = made(mesh)
    load_full_state_dict(net, {**zero.full_state_dict(), NAME: torch.full((40, 16), 1e5)})
    with pytest.raises(ZeroError, match=r"full_state_dict\(\): .* overflow fp16"):
        zero.full_state_dict(rank0_only=True, dtype="fp16")
    with pytest.raises(ZeroError, match="ModuleList is not the module that shard"):
        full_state_dict(net.blocks)
    with pytest.raises(ZeroError, match=r"Linear is not sharded: call shard\(\) first"):
        full_state_dict(nn.Linear(2, 2))


@pytest.mark.parametrize("call", ["full_state_dict", "state_dict"])
def test_units_are_gathered_one_after_the_other(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a unit is gathered, the gathered values of the unit before are freed, so a device holds one at a time."""
    gather, left = WholeValues.masters, []

    def masters(whole: WholeValues) -> list[Tensor]:
        left.append(sum(reference() is not None for reference in gathered))
        values = gather(whole)
        gathered[:] = [weakref.ref(value.untyped_storage()) for value in values]
        return values

    def body(mesh: Mesh) -> int:
        net, zero = made(mesh)
        state = zero.full_state_dict(rank0_only=True) if call == "full_state_dict" else net.state_dict()
        return len(state)

    gathered: list[Any] = []
    monkeypatch.setattr(WholeValues, "masters", masters)
    assert on_threads(Topology(1, 1), body) == [21]
    assert left == [0] * 4  # the root and three blocks


# torch's own methods and functions


def _of_torch(mesh: Mesh) -> dict[str, bool]:
    """Return whether torch's functions give and load the values that the engine's own methods do."""
    net, zero = made(mesh, tied=True)
    every = zero.full_state_dict()
    whole = StateDictOptions(full_state_dict=True)
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = {
        "the method is torch's": "load_state_dict" not in vars(net) and "state_dict" not in vars(net),
        "plain": same(net.state_dict(), every),
        "get": same(of_torch.get_model_state_dict(net), every),
        "get full": same(of_torch.get_model_state_dict(net, options=whole), every),
        "get for rank 0": same(
            of_torch.get_model_state_dict(net, options=on_rank_0), {} if mesh.rank else every
        ),
    }
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for factor, options in enumerate((None, whole, on_rank_0, from_rank_0), 2):
        state = {name: value * factor for name, value in every.items()}
        given = {} if options is from_rank_0 and mesh.rank else {name: v.clone() for name, v in state.items()}
        report = of_torch.set_model_state_dict(net, given, options=options)
        found[f"set {options}"] = same(zero.full_state_dict(), state) and not any(report)
    return found


def test_torch_s_functions_give_and_load_the_same_values() -> None:
    """get_model_state_dict() and set_model_state_dict() with their options, and the methods that they call."""
    for found in on_processes(Topology(2, 2), _of_torch):
        assert [claim for claim, holds in found.items() if not holds] == []
        assert len(found) == 9


class Wrapper(nn.Module):
    """A module that holds a sharded model, and a layer that is not sharded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(2, 2), inner


@each_rank(1, 2)
def test_a_larger_module_loads_and_gives_the_state_of_a_sharded_part(mesh: Mesh) -> None:
    """The entries have the part's path before their names."""
    net, zero = made(mesh)
    outer = Wrapper(net)
    state = outer.state_dict()
    assert same(
        {k.removeprefix("inner."): v for k, v in state.items() if "inner" in k}, zero.full_state_dict()
    )
    other = {name: value + 1 for name, value in state.items()}
    outer.load_state_dict(other)
    assert same(outer.state_dict(), other)


@each_rank(1, 2)
def test_some_entries_are_loaded_without_strict(mesh: Mesh) -> None:
    """Entries that are missing keep their values, others are reported, as torch does for a plain model."""
    net, zero = made(mesh, tied=True)
    before = zero.full_state_dict()
    some = {NAME: NEW, "head.weight": torch.ones(16, 16), "count": torch.tensor([7])}
    for strict in (True, False):
        if strict:
            with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
                net.load_state_dict({**some, "other": NEW})
        else:
            report = net.load_state_dict({**some, "other": NEW}, strict=False)
            assert report.unexpected_keys == ["other"]
            assert {*report.missing_keys} == {*before} - {*some, "embed.weight"}  # tied to head.weight
    after = zero.full_state_dict()
    assert same(after, {**before, **some, "embed.weight": torch.ones(16, 16)})
    with pytest.raises(ZeroError, match="is bool, expected float32"):
        net.load_state_dict({**some, "embed.bias": torch.ones(16), NAME: NEW > 1}, strict=False)
    assert same(zero.full_state_dict(), after)


@each_rank(1, 2)
def test_a_state_without_values_is_refused_where_it_is_used(mesh: Mesh) -> None:
    """A block's own state dict, and detach() outside of passes, have no values: an operation on one is an error."""
    net, _ = made(mesh)
    for entry in (net.blocks[1].state_dict()["up.weight"], net.blocks[1].up.weight.detach()):
        assert entry.shape == (40, 16)
        assert not entry.requires_grad
        with pytest.raises(ZeroError, match=f"'{NAME}' is used outside of a forward pass"):
            _ = entry + 1
    kept = net.state_dict(keep_vars=True)
    assert kept[NAME] is net.blocks[1].up.weight


@each_rank(1, 2)
def test_one_rank_may_take_the_state_where_all_parameters_are_shown(mesh: Mesh) -> None:
    """Under GatheredParameters of all parameters state_dict() is torch's, and sends nothing."""
    net, zero = made(mesh)
    wanted = zero.full_state_dict()
    with GatheredParameters(net.parameters()):
        if mesh.rank == 0:
            assert same(net.state_dict(), wanted)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([1e300, 0.0], dtype=torch.float64), "overflow fp32"),
        (torch.tensor([1e300j, 0j], dtype=torch.complex128), "overflow fp32"),
        (torch.tensor([(1 << 24) + 1, 0]), "is int64, expected complex64"),
    ],
)
@each_rank(1, 2)
def test_a_complex_buffer_takes_only_values_that_it_can_hold(mesh: Mesh, value: Tensor, message: str) -> None:
    """Real and imaginary parts are checked as real values are; what fits is loaded."""
    net = nn.Linear(2, 2)
    net.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
    zero = shard(net, mesh=mesh, policy=EXACT)
    state = zero.full_state_dict()
    with pytest.raises(ZeroError, match=message):
        zero.load_full_state_dict({**state, "turns": value})
    assert zero.full_state_dict()["turns"].tolist() == [0j, 0j]
    for fits in (torch.tensor([1 + 2j, 3j], dtype=torch.complex128).conj(), torch.tensor([7, 8])):
        zero.load_full_state_dict({**state, "turns": fits})
        assert zero.full_state_dict()["turns"].tolist() == fits.to(torch.complex64).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {"step": state["step"]}, "state has no micro_batch"),
        (lambda _: {}, "state has no micro_batch and no step"),
        (lambda state: {**state, "other/error": torch.zeros(1)}, "entries of unit 'other'"),
        (lambda state: {**state, "other": torch.zeros(1)}, "an entry 'other' of no unit"),
    ],
)
@each_rank(1, 2)
def test_a_communication_state_that_does_not_fit_is_refused(mesh: Mesh, change: Any, message: str) -> None:
    """A state of another model, or a part of one, raises a ZeroError, and the engine stays as it was."""
    zero = shard(nn.Linear(2, 2), mesh=mesh, policy=EXACT)
    with pytest.raises(ZeroError, match=message):
        zero.load_communication_state(change(zero.communication_state() | {"step": torch.tensor(3)}))
    assert zero.communication_state()["step"] == 0
