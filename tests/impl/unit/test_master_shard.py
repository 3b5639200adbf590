"""Tests that everything users do to masters takes effect, and in time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import Tensor, nn

from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.ops import sums_of_bits
from impl.policy.policy import MemoryLimits, Offload, Policy
from impl.policy.presets import preset
from impl.zero import Zero, shard
from tests.support.ranks import each_rank
from tests.support.training import batch, model, sgd

ROOMY = MemoryLimits(max_padding=1e9)
POLICIES: dict[str, Policy] = {
    "exact": preset("exact", memory=ROOMY),
    "zero3": preset("zero3", memory=ROOMY),
    "zeropp": preset("zeropp", memory=ROOMY),
    "hpz": preset("exact", memory=ROOMY, secondary="node"),
    "stage 2": preset("exact", memory=ROOMY, stage=2),
    "stage 1": preset("exact", memory=ROOMY, stage=1),
    "stage 0": preset("exact", memory=ROOMY, stage=0),
    "persistent": preset("exact", memory=MemoryLimits(max_padding=1e9, persist_below=10**9)),
    "offload": preset("exact", memory=ROOMY, offload=Offload(optimizer=1.0, weights=1.0)),
    "differences": preset("zeropp", memory=ROOMY, secondary_format="bf16", differences=parse("int8:64")),
}


def blocks(width: int = 16) -> nn.Module:
    """Return three blocks; the last has no activation, so its output halves if its weights do."""
    parts = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(3)]
    return nn.Sequential(*parts)


def halve_foreach(masters: Sequence[nn.Parameter]) -> None:
    torch._foreach_mul_([master.data for master in masters if master.numel()], 0.5)


def halve_vector(masters: Sequence[nn.Parameter]) -> None:
    vector = nn.utils.parameters_to_vector(masters) * 0.5
    nn.utils.vector_to_parameters(vector, masters)  # assigns .data, views of the vector


@torch.no_grad()
def halve_set(masters: Sequence[nn.Parameter]) -> None:
    for master in masters:
        master.set_(master * 0.5)


@torch.no_grad()
def halve_counted(masters: Sequence[nn.Parameter]) -> None:
    for master in masters:
        master.mul_(0.5)


def halve_each(write: Callable[[nn.Parameter], Any]) -> Callable[[Sequence[nn.Parameter]], None]:
    def halve(masters: Sequence[nn.Parameter]) -> None:
        for master in masters:
            write(master)

    return halve


def assign_halves(master: nn.Parameter) -> None:
    master.data = master.data * 0.5


def through_numpy(master: nn.Parameter) -> None:
    array = master.data.cpu().numpy()
    array *= 0.5


WRITES = {
    "data.copy_": halve_each(lambda p: p.data.copy_(p.data * 0.5)),
    "data.mul_": halve_each(lambda p: p.data.mul_(0.5)),
    "data[:]": halve_each(lambda p: p.data.__setitem__(slice(None), p.data * 0.5)),
    "data =": halve_each(assign_halves),
    "numpy": halve_each(through_numpy),
    "foreach": halve_foreach,
    "vector_to_parameters": halve_vector,
    "set_": halve_set,
    "counted": halve_counted,
    "detach": halve_each(lambda p: p.detach().mul_(0.5)),
}


def masters_of(zero: Zero) -> list[nn.Parameter]:
    return [master for group in zero.param_groups() for master in group["params"]]


def output(net: nn.Module) -> Tensor:
    with torch.no_grad():
        return net(batch(0, 0))


def seen(zero: Zero) -> Tensor:
    """Return the output with the engine's weights, after :meth:`Zero.weights_changed` if the pass is refused."""
    try:
        return output(zero.model)
    except ZeroError as error:
        refusal = str(error)
    assert "zero.weights_changed()" in refusal
    assert "\n" not in refusal
    zero.weights_changed()
    return output(zero.model)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", POLICIES)
def test_written_masters_are_evaluated_or_refused(policy: str, write: str) -> None:
    """After any write, an evaluation uses the new weights, or an error names the call that it needs."""

    @each_rank(1, 2)
    def run(mesh: Mesh) -> None:
        zero = shard(model(blocks), mesh=mesh, policy=POLICIES[policy])
        before = output(zero.model)
        WRITES[write](masters_of(zero))
        after = seen(zero)
        reference = model(blocks)
        reference.load_state_dict(zero.full_state_dict())
        exact = POLICIES[policy].weights == "fp32"
        torch.testing.assert_close(
            after, output(reference), rtol=1e-5 if exact else 0.1, atol=1e-2 - exact * 9e-3
        )
        assert (after - before).abs().max() > 0.05
        assert torch.equal(output(zero.model), after)  # nothing is refused twice

    run()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kept", [False, True])
def test_steps_follow_an_assignment(policy: str, *, kept: bool) -> None:
    """``p.data = old`` after a climb, as SAM does it, trains as in one process, also if ``old`` is kept."""

    def train(optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> list[Any]:
        masters, held = [p for group in optimizer.param_groups for p in group["params"]], []
        for step in range(4):
            backward(step)
            old = [master.data.clone() for master in masters]
            with torch.no_grad():
                for master in masters:
                    if master.grad is not None:
                        master.add_(master.grad, alpha=0.1)
            optimizer.zero_grad()
            backward(step)
            for master, values in zip(masters, old, strict=True):
                master.data = values
            optimizer.step()
            optimizer.zero_grad()
            held += old if kept else []
        return held

    reference = model(blocks)
    train(
        sgd(reference.parameters()),
        lambda step: (sum(reference(batch(step, rank)).square().mean() for rank in range(2)) / 2).backward(),
    )

    @each_rank(1, 2)
    def run(mesh: Mesh) -> None:
        zero = shard(model(blocks), mesh=mesh, policy=POLICIES[policy])
        held = train(
            sgd(zero.param_groups()),
            lambda step: zero.model(batch(step, mesh.rank)).square().mean().backward(),
        )
        state, moved = zero.full_state_dict(), model(blocks).state_dict()
        for name, values in reference.state_dict().items():
            largest = (values - moved[name]).abs().max()
            tolerance = 1e-4 if all(str(codec) == "fp32" for codec in POLICIES[policy].codecs) else 0.5
            assert (state[name] - values).abs().max() <= tolerance * largest + 1e-7
        del held

    run()


@each_rank(1, 2)
def test_memory_that_a_user_keeps_stays_the_masters(mesh: Mesh) -> None:
    """Masters that are views of a user's vector follow later writes to the vector, as in torch."""
    zero = shard(model(blocks), mesh=mesh, policy=POLICIES["exact"])
    masters = masters_of(zero)
    vector = nn.utils.parameters_to_vector(masters).detach()
    nn.utils.vector_to_parameters(vector, masters)
    before = output(zero.model)
    vector.mul_(0.5)
    assert not torch.allclose(output(zero.model), before, rtol=1e-2)
    zero.load_full_state_dict(model(blocks).state_dict())
    assert torch.equal(output(zero.model), before)
    assert torch.equal(nn.utils.parameters_to_vector(masters), vector)


def back_up(masters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Put average weights in and take them out without a copy, as recipes for moving averages do."""
    old = [master.data for master in masters]
    for master in masters:
        master.data = master.data * 0.5
    yield
    for master, values in zip(masters, old, strict=True):
        master.data = values
    yield


def exchange(masters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Exchange memory with other tensors, and then write to those."""
    others = [master.detach() * 0.5 for master in masters]
    for master, other in zip(masters, others, strict=True):
        master.data, other.data = other.data, master.data
    yield
    for other in others:
        other.zero_()
    yield
    for other in others:
        other.fill_(0.1)
    for master, other in zip(masters, others, strict=True):
        master.data = other
    yield


def alias(masters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Write to aliases of old memory after half of the masters got other memory."""
    aliases = [master.detach() for master in masters]
    for master in masters[::2]:
        master.data = master.data * 0.5
    yield
    for values in aliases:
        values.mul_(0.3)
    yield


def cross(masters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let two masters take each other's memory."""
    first, second = next((a, b) for a, b in itertools.combinations(masters, 2) if a.shape == b.shape)
    first.data, second.data = second.data, first.data
    yield


def array(masters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give masters memory of NumPy's, and write to it later."""
    arrays = [master.detach().numpy().copy() for master in masters]
    for master, values in zip(masters, arrays, strict=True):
        master.data = torch.from_numpy(values)
    yield
    for values in arrays:
        values[:] = values * 0.5
    yield


@pytest.mark.parametrize("write", [back_up, exchange, alias, cross, array])
@pytest.mark.parametrize("policy", ["exact", "hpz", "offload"])
@each_rank(1, 2)
def test_memory_behaves_as_that_of_parameters(
    mesh: Mesh, write: Callable[[Sequence[nn.Parameter]], Iterator[None]], policy: str
) -> None:
    """If users keep, exchange and reassign masters' memory, masters have the values that plain parameters have."""
    zero = shard(model(blocks), mesh=mesh, policy=POLICIES[policy])
    units = [unit for unit in zero.units if unit.geometry.trainable]
    masters = [master for unit in units for _, master in unit.master_shard.masters]
    spans = [(unit, *span) for unit in units for _, *span in unit.geometry.spans(mesh.rank)]
    plain = [nn.Parameter(master.detach().clone()) for master in masters]
    output(zero.model)
    for _ in zip(write(masters), write(plain), strict=True):
        zero.weights_changed()
        output(zero.model)
        for master, values, (unit, start, end) in zip(masters, plain, spans, strict=True):
            assert torch.equal(master, values)
            assert torch.equal(unit.master_shard.held[start:end], values)


@each_rank(1, 2)
def test_memory_that_nobody_keeps_is_given_up(mesh: Mesh) -> None:
    """A master becomes a view of the shard again once its values are copied and nobody holds its memory."""
    zero = shard(model(blocks), mesh=mesh, policy=POLICIES["exact"])
    addresses = [master.data_ptr() for master in masters_of(zero)]
    WRITES["data ="](masters_of(zero))
    assert [master.data_ptr() for master in masters_of(zero)] != addresses
    output(zero.model)
    assert [master.data_ptr() for master in masters_of(zero)] == addresses


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1].clone(),
        lambda data: torch.cat([data, data]),
        lambda data: data.double(),
        lambda data: data.bfloat16(),
        lambda data: data.view(-1, 2),
        lambda data: data[::2],
        lambda data: data.to("meta"),
    ],
)
@each_rank(1, 2)
def test_other_data_is_refused(mesh: Mesh, change: Callable[[Tensor], Tensor]) -> None:
    """Data of another shape, type or device is refused; the error names both."""
    zero = shard(model(blocks), mesh=mesh, policy=POLICIES["exact"])
    master = masters_of(zero)[0]
    shape = tuple(master.shape)
    try:
        master.data = change(master.data)
    except RuntimeError:
        return  # torch refuses it
    with pytest.raises(ZeroError, match="was given data of shape") as error:
        output(zero.model)
    assert str(shape) in str(error.value)


@each_rank(1, 2)
def test_frozen_masters_and_hooks_are_refused(mesh: Mesh) -> None:
    """A frozen master, or a hook on one, is refused, since autograd does not reach masters."""
    zero = shard(model(blocks), mesh=mesh, policy=POLICIES["exact"])
    master = masters_of(zero)[0]
    master.requires_grad_(False)
    with pytest.raises(ZeroError, match="was frozen"):
        zero.model(batch(0, mesh.rank))
    master.requires_grad_(True)
    for register in (master.register_hook, master.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with pytest.raises(ZeroError, match="has a gradient hook"):
            zero.model(batch(0, mesh.rank))
        handle.remove()
    zero.model(batch(0, mesh.rank)).sum().backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_kept_gradients_stay(ranks: int) -> None:
    """Gradients that a user keeps are not overwritten by those of the next loss."""

    @each_rank(1, ranks)
    def run(mesh: Mesh) -> None:
        zero = shard(model(blocks), mesh=mesh, policy=POLICIES["exact"])
        kept, copies = [], []
        for step in range(3):
            zero.model(batch(step, mesh.rank)).square().mean().backward()
            kept.append([master.grad for master in masters_of(zero)])
            copies.append([gradient.clone() for gradient in kept[-1]])
            zero.model.zero_grad()
        for gradients, values in zip(kept, copies, strict=True):
            assert all(map(torch.equal, gradients, values))

    run()


@each_rank(1, 2)
def test_memory_of_gradients_is_reused(mesh: Mesh) -> None:
    """While nobody keeps a gradient, all steps write to one memory."""
    zero = shard(model(blocks), mesh=mesh, policy=POLICIES["zero3"])
    addresses = set()
    for step in range(3):
        zero.model(batch(step, mesh.rank)).square().mean().backward()
        addresses.add(tuple(master.grad.data_ptr() for master in masters_of(zero)))
        zero.model.zero_grad()
    assert len(addresses) == 1


@each_rank(1, 2)
def test_assigned_gradients_count(mesh: Mesh) -> None:
    """A gradient that a user assigns is what norms, steps and access see, and later gradients are added to it."""
    zero = shard(model(blocks), mesh=mesh, policy=POLICIES["exact"])
    shards = [unit.master_shard for unit in zero.units]
    zero.model(batch(0, mesh.rank)).square().mean().backward()
    means = [part.mean_gradient().clone() for part in shards]
    for master in masters_of(zero):
        master.grad = master.grad * 2
    assert all(
        torch.equal(shard.mean_gradient(), 2 * mean) for shard, mean in zip(shards, means, strict=True)
    )
    zero.model(batch(0, mesh.rank)).square().mean().backward()
    assert all(
        torch.equal(shard.mean_gradient(), 3 * mean) for shard, mean in zip(shards, means, strict=True)
    )
    shards[0].load_gradient(1, 3, torch.tensor([5.0, 7.0]))
    assert shards[0].mean_gradient()[1:3].tolist() == [5.0, 7.0]
    assert shards[0].masters[0][1].grad[1:3].tolist() == [5.0, 7.0]


@given(
    st.integers(0, 5000),
    st.lists(st.tuples(st.integers(0, 4999), st.integers(-(2**31), 2**31 - 1)), min_size=1, max_size=3),
)
@example(2048, [(0, 1), (1, -1)])
@example(4098, [(4096, 1)])
@example(3, [(2, 1)])
def test_sums_tell_writes_apart(numel: int, writes: list[tuple[int, int]]) -> None:
    """Up to three written elements, anywhere and with any bits, change the sums."""
    values = torch.arange(numel, dtype=torch.float32)
    bits = values.clone().view(torch.int32)
    for place, value in writes:
        if place < numel:
            bits[place] = value
    changed = not torch.equal(bits, values.view(torch.int32))
    assert torch.equal(sums_of_bits(values), sums_of_bits(bits.view(torch.float32))) is not changed


def test_sums_tell_swaps_apart() -> None:
    """Swapped rows, and the reversed order, change the sums."""
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    for other in (values[[1, 0, *range(2, 64)]], values.flip(0), values.flip(1)):
        assert not torch.equal(sums_of_bits(values.flatten()), sums_of_bits(other.flatten()))
