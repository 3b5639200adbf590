"""Tests of GatheredParameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.parameters.access import Gradient, Weights
from impl.parameters.gathered import GatheredParameters
from impl.policy.policy import MemoryLimits, Offload, Policy, Stage
from impl.policy.presets import preset
from impl.zero import Zero, shard
from tests.support.models import Net
from tests.support.ranks import each_rank
from tests.support.strategies import EXACT
from tests.support.training import batch, model

ROOMY = MemoryLimits(max_padding=99.0)
NAME = "blocks.1.up.weight"
POLICIES: dict[str, Policy] = {
    **{f"stage {stage}": replace(EXACT, stage=stage) for stage in (0, 1, 2, 3)},
    "bf16": preset("zero3", memory=ROOMY, compute="bf16"),
    "zeropp": preset("zeropp", memory=ROOMY),
    "group": replace(EXACT, group=2),
    "hpz": replace(EXACT, secondary="node"),
    "offload": replace(EXACT, offload=Offload(optimizer=1.0, weights=1.0)),
    "frozen codes": replace(EXACT, frozen=parse("int8:64")),
}


def made(mesh: Mesh, policy: Policy) -> tuple[nn.Module, Zero]:
    net = model(Net)
    if policy.frozen is not None:
        net.get_submodule("blocks.1").requires_grad_(requires_grad=False)
    return net, shard(net, mesh=mesh, policy=policy)


VALUES = model(Net).state_dict()


def weight(net: nn.Module) -> nn.Parameter:
    return net.get_parameter(NAME)


@pytest.mark.parametrize("name", POLICIES)
@each_rank(2, 2)
def test_a_change_of_the_modifier_is_seen_by_all_ranks(mesh: Mesh, name: str) -> None:
    """All ranks have what rank 1 wrote; other ranks' writes are discarded, and other parameters keep their bits."""
    policy = POLICIES[name]
    net, zero = made(mesh, policy)
    with torch.no_grad():
        before = zero.full_state_dict()
        net(batch(0, mesh.rank))
        with GatheredParameters(weight(net), modifier_rank=1):
            shown = weight(net)
            assert shown.shape == before[NAME].shape
            assert torch.equal(shown, before[NAME].to(shown.dtype))
            shown.fill_(0.25 if mesh.rank == 1 else 7.0)
            shown[0] = before[NAME][0]
        after = zero.full_state_dict()
        net(batch(0, mesh.rank))
    changed = after.pop(NAME)
    bound = 0.01 if policy.frozen is not None else 0.0
    assert (changed[0] - before[NAME][0]).abs().max() <= bound
    assert (changed[1:] - 0.25).abs().max() <= bound
    assert all(torch.equal(value, before[entry]) for entry, value in after.items())


@pytest.mark.parametrize("name", ["stage 3", "bf16"])
@each_rank(1, 2)
def test_elements_that_were_not_changed_keep_their_masters(mesh: Mesh, name: str) -> None:
    """Also in a policy that computes in bf16, showing parameters does not round their fp32 masters."""
    net, zero = made(mesh, POLICIES[name])
    with torch.no_grad(), GatheredParameters(list(net.parameters()), modifier_rank=0):
        weight(net)[0, 0] = 3.0
    after = zero.full_state_dict()[NAME]
    assert after[0, 0] == 3.0
    assert int((after != VALUES[NAME]).sum()) == 1


@each_rank(1, 2)
def test_a_change_without_modifier_is_an_error_on_all_ranks(mesh: Mesh) -> None:
    """If one rank writes, all ranks raise an error that names it, and the old values stay."""
    net, zero = made(mesh, EXACT)
    changed = pytest.raises(
        ZeroError, match=r"parameters were changed \(1 of 2; ranks: 1\): set modifier_rank"
    )
    with changed, torch.no_grad(), GatheredParameters([weight(net), net.get_parameter("head.bias")]):
        weight(net).mul_(1 - mesh.rank)
    assert torch.equal(zero.full_state_dict()[NAME], VALUES[NAME])


@each_rank(2, 2)
def test_a_change_ends_the_life_of_the_secondary(mesh: Mesh) -> None:
    """After a change hpZ's copy is stale, and training goes on with the new weights (DeepSpeed 4851)."""
    net, zero = made(mesh, replace(EXACT, secondary=2))
    loss = net(batch(0, mesh.rank))
    unit = next(unit for unit in zero.units if unit.geometry.name == "blocks.1")
    assert unit.weight_gather.secondary._version is not None
    loss.backward()
    alone = model()
    with torch.no_grad(), GatheredParameters(weight(net), modifier_rank=0):
        weight(net).mul_(2)
        weight(alone).mul_(2)
    assert unit.weight_gather.secondary._version is None
    with torch.no_grad():
        assert torch.allclose(net(batch(0, mesh.rank)), alone(batch(0, mesh.rank)), rtol=1e-5)


@each_rank(1, 2)
def test_contexts_nest_and_overlap_by_parameter(mesh: Mesh) -> None:
    """Two parameters of one unit may be in two contexts, left in any order; one parameter cannot be in both."""
    net, zero = made(mesh, EXACT)
    bias = net.get_parameter("blocks.1.up.bias")
    outer, inner = GatheredParameters(weight(net), modifier_rank=0), GatheredParameters(bias, modifier_rank=1)
    with torch.no_grad(), outer:
        inner.__enter__()
        weight(net).fill_(1.0 + mesh.rank)
        bias.fill_(1.0 + mesh.rank)
        with pytest.raises(ZeroError, match="inside another GatheredParameters of this parameter"):
            GatheredParameters([net.get_parameter("head.bias"), bias]).__enter__()
    inner.__exit__(None, None, None)
    state = zero.full_state_dict()
    assert (state[NAME] == 1).all()
    assert (state["blocks.1.up.bias"] == 2).all()
    assert torch.equal(state["head.bias"], VALUES["head.bias"])


@each_rank(1, 2)
def test_misuse_is_a_clear_error(mesh: Mesh) -> None:
    """A context inside a pass, a pass inside a context, and a rank that does not exist are refused."""
    inside = "GatheredParameters inside a forward or backward pass"

    def enter(*_: object, **options: int) -> None:
        with GatheredParameters(weight(net), **options):
            pass

    net, _ = made(mesh, EXACT)
    net.get_submodule("blocks.0").register_forward_hook(enter)
    with pytest.raises(ZeroError, match=inside):
        net(batch(0, 0))
    net, _ = made(mesh, EXACT)
    passing = pytest.raises(ZeroError, match=r"a pass inside GatheredParameters of 'blocks.1.up.weight'")
    with passing, GatheredParameters(weight(net)):
        net(batch(0, mesh.rank))
    with pytest.raises(ZeroError, match="modifier_rank=2 on 2 ranks"):
        enter(modifier_rank=2)
    net, _ = made(mesh, EXACT)
    x = batch(0, mesh.rank).requires_grad_()
    x.register_hook(enter)
    with pytest.raises(ZeroError, match=inside):
        net(x).backward()


@each_rank(1, 2)
def test_an_exception_inside_writes_nothing_back(mesh: Mesh) -> None:
    """An exception in the body propagates, and the weights keep their old values."""
    net, zero = made(mesh, EXACT)
    raised = pytest.raises(KeyError, match="mine")
    with raised, torch.no_grad(), GatheredParameters(weight(net), modifier_rank=0):
        weight(net).zero_()
        raise KeyError("mine")
    assert torch.equal(zero.full_state_dict()[NAME], VALUES[NAME])


@each_rank(1, 2)
def test_plain_parameters_and_disabled_contexts_are_left_alone(mesh: Mesh) -> None:
    """Code written for sharded models runs on a plain model too; ``enabled=False`` does nothing."""
    net = nn.Linear(3, 3)
    with torch.no_grad(), GatheredParameters(net.weight, modifier_rank=0):
        net.weight.zero_()
    assert not net.weight.any()
    taken = weight(made(mesh, EXACT)[0])
    with GatheredParameters(taken, enabled=False), pytest.raises(ZeroError, match="outside of a forward"):
        taken.sum()


@each_rank(1, 1)
def test_a_parameter_taken_before_sharding_is_refused(mesh: Mesh) -> None:
    """The error says, by name, that the parameter is no longer in the model."""
    net = Net()
    taken = weight(net)
    shard(net, mesh=mesh, policy=EXACT)
    for use in (lambda: GatheredParameters(taken).__enter__(), taken.sum):
        with pytest.raises(ZeroError, match=f"'{NAME}'.*was replaced when the model was sharded"):
            use()


@each_rank(1, 2)
def test_a_backward_pass_to_gathered_parameters_is_an_error(mesh: Mesh) -> None:
    """Such a gradient would reach no optimizer, so an error is raised."""
    net, _ = made(mesh, EXACT)
    lost = pytest.raises(ZeroError, match=f"'{NAME}' under GatheredParameters, and no optimizer would see")
    with lost, GatheredParameters(weight(net)):
        weight(net).square().sum().backward()
    net(batch(0, mesh.rank)).backward()


PENALTIES: list[Callable[[Tensor], Tensor]] = [
    lambda values: values.square().sum(),
    torch.norm,
    lambda values: values.abs().sum(),
    lambda values: (values @ torch.ones(values.shape[-1]).requires_grad_()).sum(),
    lambda values: (values.detach() * torch.ones(1).requires_grad_()).sum(),
]


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("stage", [0, 2, 3])
@each_rank(1, 2)
def test_a_loss_of_gathered_parameters_is_refused_later_too(mesh: Mesh, stage: Stage, penalty: Any) -> None:
    """Backward after the context raises an error that names zero.unsharded(), where such a loss trains."""
    net, zero = made(mesh, replace(EXACT, stage=stage))
    for first in (True, False):
        loss = net(batch(0, mesh.rank)) if first else torch.zeros(())
        with GatheredParameters(weight(net)):
            loss = loss + penalty(weight(net))
        with pytest.raises(
            ZeroError, match=rf"'{NAME}' that GatheredParameters showed, .* zero.unsharded\(\)"
        ):
            (loss if first else loss + net(batch(0, mesh.rank))).backward()
        zero.drop_gradients()
        zero.finish_backward()
        net.zero_grad()
    plain = model(Net)
    with zero.unsharded():
        loss = net(batch(0, 0)) + penalty(weight(net))
    loss.backward()
    (plain(batch(0, 0)) + penalty(weight(plain))).backward()
    assert torch.allclose(Gradient(zero, NAME).full(), weight(plain).grad, atol=1e-6)


@each_rank(1, 2)
def test_what_is_read_under_gathered_parameters_may_be_computed_with(mesh: Mesh) -> None:
    """Norms for a log, copies in a later backward pass, and a backward pass to other tensors are allowed."""
    net, _ = made(mesh, EXACT)
    other = torch.ones(3, requires_grad=True)
    with GatheredParameters(net.parameters()):
        norms = [parameter.norm().item() for parameter in net.parameters()]
        copied = weight(net).detach().clone()
        (weight(net).detach()[:3, 0] * other).sum().backward()
        later = (copied[:3, 0] * other).sum()
    later.backward()
    assert torch.equal(other.grad, 2 * copied[:3, 0])
    plain = model(Net)
    assert norms == [parameter.norm().item() for parameter in plain.parameters()]


@each_rank(1, 1)
def test_a_users_hooks_see_what_is_saved_beside_gathered_parameters(mesh: Mesh) -> None:
    """A user's hooks around the context get all other tensors, and the context's own hooks end with it."""
    net, _ = made(mesh, EXACT)
    other, seen = torch.ones(40, 16, requires_grad=True), []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with GatheredParameters(weight(net)):
            weight(net) * other
        other.exp()
    assert len(seen) == 2
    assert seen[0] is other
    with torch.autograd.graph.disable_saved_tensors_hooks("by me"), GatheredParameters(weight(net)):
        assert weight(net).isfinite().all()


@each_rank(1, 2)
def test_what_writes_weights_is_refused_while_parameters_are_seen_whole(mesh: Mesh) -> None:
    """Steps, loads and sets inside the context raise an error, since leaving it would undo them."""
    net, zero = made(mesh, EXACT)
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
    net(batch(0, mesh.rank)).backward()
    whole = zero.full_state_dict()
    with GatheredParameters(weight(net)):
        for call, write in {
            r"optimizer\.step\(\)": optimizer.step,
            r"load_full_state_dict\(\)": lambda: zero.load_full_state_dict(whole),
            r"access.Weights": lambda: Weights(zero, NAME).set_full(whole[NAME]),
        }.items():
            with pytest.raises(ZeroError, match=f"{call} under GatheredParameters of '{NAME}'"):
                write()
    optimizer.step()


@each_rank(1, 2)
def test_a_replaced_parameter_object_is_an_error(mesh: Mesh) -> None:
    """If a module holds another object than its parameter, all ranks raise an error, and the parameter is put back."""
    net, zero = made(mesh, EXACT)
    up = net.get_submodule("blocks.1.up")
    refused = pytest.raises(ZeroError, match=f"'{NAME}' was replaced by another object")
    before = zero.full_state_dict()[NAME]
    with refused, GatheredParameters(weight(net), modifier_rank=0):
        if mesh.rank == 0:
            up.weight = nn.Parameter(torch.zeros(weight(net).shape))
    assert torch.equal(zero.full_state_dict()[NAME], before)
    net(batch(0, mesh.rank)).backward()


@each_rank(1, 2)
def test_load_state_dict_loads_a_model_whose_parameters_are_all_seen_whole(mesh: Mesh) -> None:
    """If all parameters are shown, each rank loads, since it has its own buffers; if only some are, it is an error."""
    net, zero = made(mesh, EXACT)
    ones = {name: torch.ones_like(value) for name, value in VALUES.items()}
    with GatheredParameters(net.parameters(), modifier_rank=0):
        net.load_state_dict(ones)
    assert all(bool((value == 1).all()) for value in zero.full_state_dict().values())
    loads = pytest.raises(ZeroError, match=r"load_state_dict\(\) under GatheredParameters of")
    with loads, GatheredParameters(weight(net), modifier_rank=0):
        net.load_state_dict(ones)


SHAPE = tuple(VALUES[NAME].shape)
# What users assign to the data of a weight (40, 16), and what is wrong with it: nothing in other strides.
ASSIGNED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "transposed": (lambda new: new.t().contiguous().t(), ""),
    "every second": (lambda new: new.repeat_interleave(2, dim=1)[:, ::2], ""),
    "rows of another": (lambda new: torch.cat([new, new, new])[40:80], ""),
    "one row": (lambda new: new[:1].expand(40, 16), ""),
    "one element": (lambda new: new[0, 0].expand(40, 16), ""),
    "more rows": (lambda new: new.new_ones(42, 16), r"shape \(42, 16\) in place of \(40, 16\)"),
    "fewer rows": (lambda new: new[:39], r"shape \(39, 16\) in place of \(40, 16\)"),
    "wider": (lambda new: new.new_ones(40, 17), r"shape \(40, 17\) in place of \(40, 16\)"),
    "as many elements": (lambda new: new.view(16, 40), r"shape \(16, 40\) in place of \(40, 16\)"),
    "flat": (lambda new: new.view(-1), r"shape \(640,\) in place of \(40, 16\)"),
    "a number": (lambda new: new[0, 0].clone(), r"shape \(\) in place of \(40, 16\)"),
    "nothing": (lambda new: new[:0], r"shape \(0, 16\) in place of \(40, 16\)"),
    "fp64": (lambda new: new.double(), "float64 on cpu in place of"),
    "fp16": (lambda new: new.half(), "float16 on cpu in place of"),
    "fp8": (lambda new: new.to(torch.float8_e4m3fn), "float8_e4m3fn on cpu in place of"),
    "complex": (lambda new: new.cfloat(), "complex64 on cpu in place of"),
}


@pytest.mark.parametrize("policy", ["stage 0", "stage 2", "stage 3", "bf16", "hpz", "offload", "group"])
@pytest.mark.parametrize("kind", ASSIGNED)
@each_rank(2, 2)
def test_assigned_data_is_taken_in_any_strides_and_refused_in_another_shape_or_type(
    mesh: Mesh, policy: str, kind: str
) -> None:
    """All ranks refuse data of another shape, by name with both shapes, whichever rank assigns it; old values stay."""
    change, fault = ASSIGNED[kind]
    net, zero = made(mesh, POLICIES[policy])
    before = zero.full_state_dict()
    new = torch.arange(640.0).remainder(128).view(SHAPE).to(weight(net).dtype)
    for assigning, modifier in ((1, 1), (3, 0)):
        context = GatheredParameters([weight(net), net.get_parameter("head.bias")], modifier_rank=modifier)
        context.__enter__()
        if mesh.rank == assigning:
            weight(net).data = change(new)
        if not fault:
            context.__exit__(None, None, None)
            continue
        match = f"'{NAME}' was given data of {fault} .*, on rank {assigning}: "
        with pytest.raises(ZeroError, match=match):
            context.__exit__(None, None, None)
    after = zero.full_state_dict()
    old = before.pop(NAME)
    assert torch.equal(after[NAME], old if fault else change(new).float())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert weight(net).shape == SHAPE
    net(batch(0, mesh.rank)).backward()


@each_rank(1, 2)
def test_what_set_and_freed_memory_do_is_seen(mesh: Mesh) -> None:
    """``set_()`` counts as an assignment; data whose memory was freed is refused and not read."""
    net, zero = made(mesh, EXACT)
    with torch.no_grad(), GatheredParameters(weight(net), modifier_rank=0):
        weight(net).set_(torch.full(SHAPE, 2.0))
    assert (zero.full_state_dict()[NAME] == 2).all()
    refused = pytest.raises(ZeroError, match=r"of shape \(3,\) in place of \(40, 16\)")
    with torch.no_grad(), refused, GatheredParameters(weight(net), modifier_rank=0):
        weight(net).set_(torch.zeros(3))
    refused = pytest.raises(ZeroError, match=f"'{NAME}' has data whose memory was freed .*, on rank 0: ")
    with refused, GatheredParameters(weight(net), modifier_rank=0):
        weight(net).data = torch.zeros(SHAPE)
        weight(net).data.untyped_storage().resize_(0)
    assert (zero.full_state_dict()[NAME] == 2).all()


@each_rank(1, 2)
def test_data_assigned_to_a_parameter_taken_in_a_pass_counts(mesh: Mesh) -> None:
    """The object that was taken in a pass is not the one that modules hold later, but it is the same parameter."""
    net, zero = made(mesh, EXACT)
    taken: list[nn.Parameter] = []
    net.get_submodule("blocks.1.up").register_forward_hook(lambda *_: taken.append(weight(net)))
    with torch.no_grad():
        net(batch(0, mesh.rank))
    assert taken[0] is not weight(net)
    with GatheredParameters(taken[0], modifier_rank=1):
        taken[0].data = torch.full(SHAPE, 1.0 + mesh.rank)
    assert (zero.full_state_dict()[NAME] == 2).all()


@each_rank(1, 2)
def test_a_parameter_removed_or_replaced_by_a_larger_one_is_an_error(mesh: Mesh) -> None:
    """Parametrizations remove a parameter, growing an embedding replaces it: both are errors, and it is put back."""
    net, zero = made(mesh, EXACT)
    up = net.get_submodule("blocks.1.up")

    def assign(value: nn.Parameter | None) -> None:
        up.weight = value

    larger = (
        r"was replaced by another object in its module, of shape \(41, 16\) in place of \(40, 16\), under "
        r"GatheredParameters, on rank 1: resize it before shard\(\)"
    )
    for change, message in (
        (lambda: delattr(up, "weight"), "was removed from its module under .*, on rank 1: keep it there"),
        (lambda: assign(None), "was removed from its module"),
        (lambda: assign(nn.Parameter(torch.ones(41, 16))), larger),
        (lambda: assign(net.get_parameter("blocks.0.up.weight")), "was replaced by another object"),
    ):
        context = GatheredParameters(weight(net), modifier_rank=0)
        context.__enter__()
        if mesh.rank == 1:
            change()
        with pytest.raises(ZeroError, match=f"'{NAME}' {message}"):
            context.__exit__(None, None, None)
        assert torch.equal(zero.full_state_dict()[NAME], VALUES[NAME])
    net(batch(0, mesh.rank)).backward()


@each_rank(1, 2)
def test_ranks_must_agree_on_the_modifier(mesh: Mesh) -> None:
    """If each rank passed its own number, every rank would keep a part of its own values."""
    net, zero = made(mesh, EXACT)
    for modifier, message in (
        (mesh.rank, "modifier_rank=0 on rank 0 and modifier_rank=1 on rank 1: give the same"),
        (None if mesh.rank else 0, "modifier_rank=0 on rank 0 and modifier_rank=None on rank 1"),
    ):
        with (
            pytest.raises(ZeroError, match=message),
            torch.no_grad(),
            GatheredParameters(weight(net), modifier_rank=modifier),
        ):
            weight(net).fill_(mesh.rank)
    assert torch.equal(zero.full_state_dict()[NAME], VALUES[NAME])
    for wrong in (-1, 2, 0.5, 0.0, True, "0"):
        with pytest.raises(ZeroError, match=f"modifier_rank={wrong} on 2 ranks"):
            GatheredParameters(weight(net), modifier_rank=wrong).__enter__()  # type: ignore[arg-type]


@each_rank(1, 2)
def test_a_tied_weight_is_written_under_any_of_its_names(mesh: Mesh) -> None:
    """A tied weight is one parameter; if one of its modules holds another object, it is an error."""
    net = model(Net, tied=True)
    zero = shard(net, mesh=mesh, policy=EXACT)
    with GatheredParameters([net.embed.weight, net.head.weight], modifier_rank=0):
        net.head.weight.data = torch.ones(16, 16).t()
        assert net.embed.weight.sum() == 256
    state = zero.full_state_dict()
    assert (state["embed.weight"] == 1).all()
    assert (state["head.weight"] == 1).all()
    untied = pytest.raises(ZeroError, match=r"'embed.weight' was replaced by another object in its module")
    with untied, GatheredParameters(net.embed.weight, modifier_rank=0):
        net.head.weight = nn.Parameter(torch.zeros(16, 16))
    assert net.head.weight is net.embed.weight


@pytest.mark.parametrize("stage", [3, 1])
@each_rank(1, 2, backend="threaded")
def test_lists_in_another_order_are_refused(mesh: Mesh, stage: int) -> None:
    """All ranks refuse lists that differ between ranks, also in the order of parameters of equal size."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero = shard(net, mesh=mesh, policy=preset("exact", stage=stage, memory=MemoryLimits(max_padding=1e9)))
    before = zero.full_state_dict()
    pair = [net[0].weight, net[1].weight]
    for listed in (pair[:: 1 - 2 * mesh.rank], pair[mesh.rank : mesh.rank + 1]):
        with (
            pytest.raises(ZeroError, match="give the same list on all ranks"),
            GatheredParameters(listed, modifier_rank=0),
            torch.no_grad(),
        ):
            listed[0].mul_(2.0)
        for name, values in zero.full_state_dict().items():
            assert torch.equal(values, before[name])


@each_rank(1, 2)
def test_other_arguments_are_refused_in_one_line(mesh: Mesh) -> None:
    """An argument that is no list of parameters is refused; the error names its type."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard(net, mesh=mesh, policy=preset("exact", memory=MemoryLimits(max_padding=1e9)))
    for listed in (net, None, dict(net.named_parameters()), ["0.weight"], "0.weight"):
        with pytest.raises(ZeroError, match="expected parameters, such as"):
            GatheredParameters(listed)
