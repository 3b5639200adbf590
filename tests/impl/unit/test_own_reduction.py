"""A reduction of one's own: the engine drives it, checks what it returns, counts its bytes and saves its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.delayed import Delayed
from examples.lossless import Lossless
from examples.powersgd import PowerSGD
from examples.sign_vote import SignVote
from examples.top_k import TopK
from impl.checkpoint import save_load
from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.plan.traffic import Sent, passes, predict
from impl.policy.own_method import MethodError, method, planned_messages
from impl.policy.policy import (
    FP32,
    Feedback,
    LossScale,
    MemoryLimits,
    Offload,
    Policy,
    PolicyError,
    parse_budget,
)
from impl.policy.presets import preset
from impl.policy.shard_layout import ParameterSpec, lay_out
from impl.policy.topology import Topology
from impl.simulate import simulate
from impl.unit.own_reduction import ReductionMethod
from impl.zero import shard
from tests.support.methods import Hops, Mean, Untupled
from tests.support.ranks import on_processes, on_threads
from tests.support.training import Training, booked, model, single, train

EXACT = Policy(weights=FP32, gradients=(FP32, FP32))


@pytest.mark.parametrize("kind", [Mean, Hops])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"stage": 0}, {"stage": 1}, {"group": "node"}, {"reduce_every": "step"}, {"secondary": "node"},
        {"memory": MemoryLimits(persist_below=20)}, {"compute": "bf16"},
    ],
    ids=str,
)  # fmt: skip
def test_an_exact_method_trains_as_one_process(kind: type[ReductionMethod], changes: dict[str, Any]) -> None:
    """With any stage, placement and accumulation, losses follow those of one process."""
    topology = Topology(2, 2)
    policy = Policy(weights=FP32, gradients=(FP32, FP32), reduce=method(kind), **changes)

    def body(mesh: Mesh) -> list[float]:
        run = Training(mesh, model(), policy)
        return [run.step(number, 2) for number in range(3)]

    losses = [math.fsum(step) / 4 for step in zip(*simulate(2, 2)(body), strict=True)]
    tolerance = 5e-2 if "compute" in changes else 1e-4
    assert losses == pytest.approx(single(model(), topology.world, 3, 2), rel=tolerance)


@pytest.mark.parametrize(
    "topology", [Topology(2, 2), Topology(1, 3), Topology(3, 1), Topology(2, 3)], ids=str
)
@pytest.mark.parametrize("coder", ["zlib", pytest.param("zstd", marks=pytest.mark.needs("zstandard"))])
def test_gradients_without_loss_train_as_bf16_does(topology: Topology, coder: str) -> None:
    """Losses and weights equal those of two hops in bf16 to the bit, and fewer bytes of gradients are sent."""
    net = model(width=64, hidden=512)
    plain, compressed = (
        on_threads(topology, train, net, Policy(reduce=reduce), 3, 2, 64)
        for reduce in ("two_hop", method(Lossless, coder=coder))
    )
    for (losses, state, zero), (same, kept, other) in zip(plain, compressed, strict=True):
        assert losses == same
        assert all(torch.equal(state[name], kept[name]) for name in state)
        sent, fewer = (booked(engine, purpose="gradients") for engine in (zero, other))
        assert 0.5 * sent < fewer < 0.85 * sent


METHODS = [method(Mean), method(PowerSGD, rank=1), method(TopK, share=0.1), method(SignVote), method(Delayed)]


@pytest.mark.parametrize("own", METHODS, ids=str)
def test_bytes_are_those_that_the_class_declares(own: Any) -> None:
    """The ledger of some steps equals the prediction from the declared messages, on every rank."""

    def body(mesh: Mesh) -> bool:
        policy = Policy(reduce=own, order_every=0)
        run = Training(mesh, model(), policy)
        for number in range(2):
            run.step(number)
        zero = run.zero
        methods = {unit.geometry.name: unit.reduction.own.messages(mesh.topology) for unit in zero.units}
        units = [unit.geometry for unit in zero.units]
        events = [event for _ in range(2) for event in passes(policy)]
        kept: Any = {"methods": methods, "buffer_bytes": zero.buffers.nbytes}
        sent = predict(policy, mesh.topology, units, mesh.rank, events, **kept).sent
        found = {key: row for key, row in zero.wire.ledger.rows().items() if key.purpose != "control"}
        assert found == {key: row for key, row in sent.items() if row != Sent(0, 0)}
        return any(key.purpose == "gradients" for key in found)

    assert all(simulate(2, 2)(body))


@pytest.mark.parametrize("own", METHODS, ids=str)
def test_a_checkpoint_resumes_to_the_bit(own: Any, tmp_path: Any) -> None:
    """Losses after loading equal those of a run that was not interrupted, and a rehearsal changes nothing."""

    def body(mesh: Mesh) -> tuple[list[float], list[float]]:
        policy = Policy(reduce=own)
        run = Training(mesh, model(), policy)
        for number in range(2):
            run.step(number)
        save_load.save(tmp_path, run.zero, run.optimizers)
        with run.zero.rehearsing():
            run.backward(7)
        after = [run.step(number) for number in range(2, 5)]
        other = Training(mesh, model(), policy)
        loaded = save_load.load(tmp_path, other.zero, other.optimizers)
        assert not loaded.dropped
        return after, [other.step(number) for number in range(2, 5)]

    for after, resumed in simulate(2, 2)(body):
        assert after == resumed


class Wrong(ReductionMethod):
    """Errs as its argument says."""

    def __init__(self, unit: Any, wire: Any, how: str) -> None:
        super().__init__(unit, wire)
        self.how = how
        if how == "made":
            raise ValueError("cannot be made")

    def start(self, gradient: Tensor) -> None:
        if self.how == "one rank" and self.wire.rank == 2:
            raise ValueError("no luck\nat all")
        sent = self.wire.all_gather(gradient.sum())
        if self.how == "hang" and self.wire.rank == 1:
            self.wire.all_gather(gradient.sum()).wait()
        sent.wait()

    def finish(self) -> Any:
        mean = torch.zeros(self.unit.shard)
        return {
            "shape": mean[:-1], "type": mean.double(), "nothing": None, "nan": mean / 0,
        }.get(self.how, mean)  # fmt: skip

    def state(self) -> Any:
        return [1] if self.how == "state" else {"a/b": torch.zeros(1)} if self.how == "name" else {}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("made", "its constructor raised ValueError: cannot be made"),
        ("one rank", r"on rank 2, unit '.*': start\(\) raised ValueError: no luck(\n|$)"),
        ("shape", r"finish\(\) returned float32 of shape \(\d+,\), expected float32 of shape \(\d+,\)"),
        ("type", r"finish\(\) returned float64 of shape"),
        ("nothing", r"finish\(\) returned NoneType, expected a tensor"),
        ("nan", r"finish\(\) returned NaN or infinity, although this rank's gradient is finite"),
        ("state", r"state\(\) returned list, expected a dict of tensors by name"),
        ("name", r"state\(\) has 'a/b' of type Tensor: expected tensors, under names without '/'"),
    ],
)
def test_errors_name_class_rank_and_unit(how: str, message: str) -> None:
    """Whatever a class does wrong, the error is one line with the class, the rank and the unit."""

    def body(mesh: Mesh) -> None:
        run = Training(mesh, model(), Policy(reduce=method(Wrong, how=how)))
        run.step(0)
        run.zero.communication_state()

    with pytest.raises(ZeroError, match=message) as caught:
        simulate(2, 2)(body)
    text = str(caught.value.args[0])  # pytest's text has the notes too
    assert "\n" not in text
    assert f"method {Wrong.__module__}:Wrong(how={how!r}) on rank " in text
    assert "unit '" in text


def test_a_rank_that_sends_more_than_others_is_reported() -> None:
    """If a rank waits for a message that no other rank sends, the wire's error names what each rank waits for."""

    def body(mesh: Mesh) -> None:
        Training(mesh, model(), Policy(reduce=method(Wrong, how="hang"))).step(0)

    with pytest.raises(RuntimeError, match=r"could not finish .*gradients") as caught:
        simulate(2, 2)(body)
    assert f"() of method {Wrong.__module__}:Wrong(how='hang')" in caught.value.__notes__[0]


def test_bytes_that_are_no_tuples_are_shown() -> None:
    """If ``bytes()`` returns anything but tuples, the error shows what it has, and what is expected."""
    geometry = lay_out("u", [ParameterSpec("w", (8,))], grain=1, world=4, max_padding=1.0)
    with pytest.raises(
        MethodError, match=r"bytes\(\) returned 'all_to_all': expected \(kind, axis, bytes\) with a kind of"
    ):
        planned_messages(method(Untupled), Topology(2, 2), [geometry])


class Lacking:
    def start(self, gradient: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Lacking, "has no method 'finish'"),
        (ReductionMethod, "has no method 'finish'"),
        (type("HalfState", (Mean,), {"load": None}), "has only one of the functions 'state' and 'load'"),
        (
            type("Unlawful", (Mean,), {"laws": ["exactly"]}),
            "unknown law 'exactly': expected some of same_on_all_ranks",
        ),
        (
            type("Unbound", (Mean,), {"laws": ["bound"]}),
            "has no method 'error_bound', which the law 'bound' needs",
        ),
        (type("OneLaw", (Mean,), {"laws": "zero"}), "laws = 'zero': expected a list"),
    ],
)
def test_classes_that_cannot_be_methods_are_refused(source: type, message: str) -> None:
    """A class that lacks what a method must have is refused with its name when the policy is made."""
    with pytest.raises(MethodError, match=message):
        method(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": 2}, "does not allow chunks='2', which cuts messages"),
        ({"sums": "fp16"}, "does not allow sums='fp16'"),
        ({"feedback": Feedback()}, "does not allow feedback='classic', which carries errors of codecs"),
        ({"compute": "fp16", "loss_scale": LossScale()}, "does not allow loss_scale='dynamic'"),
        (
            {"offload": Offload(optimizer=1.0)},
            "does not allow offload, which keeps mean gradients on the host",
        ),
        (
            {"budget": parse_budget("gradients every 5 of int3:128")},
            "does not allow budget 'gradients every 5",
        ),
    ],
)
def test_what_a_method_does_not_allow_is_refused(changes: dict[str, Any], message: str) -> None:
    """Fields that have no meaning with a method are refused in one line that says what to do."""
    with pytest.raises(PolicyError, match=message) as caught:
        Policy(reduce=method(Mean), **changes)
    assert "set reduce='two_hop'" in str(caught.value) or "remove gradients from the budget" in str(
        caught.value
    )


def test_a_name_is_read_and_not_imported() -> None:
    """A policy takes the class's name as text, and imports it only when a model is sharded."""
    policy = preset("zeropp", reduce="nowhere:Class")
    assert str(policy.own_reduce) == "nowhere:Class"
    assert policy == preset("zeropp", reduce=method("nowhere:Class"))
    with pytest.raises(
        PolicyError, match=r"reduce = 'three_hop': expected one of ring, one_hop, two_hop, 'module:Class'"
    ):
        Policy(reduce="three_hop")  # type: ignore[arg-type]

    def body(mesh: Mesh) -> None:
        Training(mesh, model(), Policy(reduce="nowhere:Class"))  # type: ignore[arg-type]

    with pytest.raises(ZeroError, match=r"nowhere:Class: cannot import 'nowhere': .* \(on rank \d, unit '"):
        simulate(1, 2)(body)


# The examples against one process


def _powersgd_of_one_process(gradients: list[list[Tensor]], rank: int) -> list[Tensor]:
    """Means by PowerSGD of the matrices that ranks have in each step, as Vogels et al. write the algorithm."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(gradients[0][0].shape[1], rank, generator=draw)
    errors, means = [torch.zeros_like(g) for g in gradients[0]], []
    for step in gradients:
        wanted = [g + e for g, e in zip(step, errors, strict=True)]
        p = torch.linalg.qr(torch.stack(wanted).mean(0) @ torch.linalg.qr(q)[0])[0]
        q = torch.stack(wanted).mean(0).T @ p
        means.append(p @ q.T)
        errors = [w - means[-1] for w in wanted]
    return means


def _top_k_of_one_process(gradients: list[list[Tensor]], k: int) -> list[Tensor]:
    """Means of the ``k`` largest elements of each rank's gradient plus what it has not sent before."""
    left, means = [torch.zeros_like(g) for g in gradients[0]], []
    for step in gradients:
        sent = []
        for i, g in enumerate(step):
            wanted = left[i] + g
            threshold = wanted.abs().flatten().sort(descending=True).values[k - 1]
            sent.append(torch.where(wanted.abs() >= threshold, wanted, 0.0))
            left[i] = wanted - sent[i]
        means.append(torch.stack(sent).mean(0))
    return means


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 8, bias=False)])


@pytest.mark.parametrize("name", ["powersgd", "top_k"])
def test_examples_equal_a_reference_of_one_process(name: str) -> None:
    """Over five steps, PowerSGD and top-k find the means that a plain program of one process finds."""
    draw = torch.Generator().manual_seed(3)
    gradients = [[torch.randn(8, 12, generator=draw) for _ in range(4)] for _ in range(5)]
    own = method(PowerSGD, rank=2) if name == "powersgd" else method(TopK, share=0.125)
    expected = (
        _powersgd_of_one_process(gradients, 2) if name == "powersgd" else _top_k_of_one_process(gradients, 12)
    )

    def body(mesh: Mesh) -> list[Tensor]:
        net = model(_Linear)
        run = Training(mesh, net, Policy(weights=FP32, reduce=own, memory=MemoryLimits(max_padding=1.0)))
        (unit,) = (unit for unit in run.zero.units if unit.geometry.slots)
        means = []
        for step in gradients:
            flat = torch.zeros(unit.geometry.padded)
            (slot,) = unit.geometry.slots
            flat[slot.offset : slot.end] = step[mesh.rank].flatten()
            reduction = unit.reduction.own
            assert reduction is not None
            reduction.start(flat)
            reduction.post_next_hop()
            means.append(reduction.finish())
        return means

    ranks = simulate(2, 2)(body)
    for step, mean in enumerate(expected):
        whole = torch.cat([rank[step] for rank in ranks])[: mean.numel()]
        torch.testing.assert_close(whole.view(mean.shape), mean, rtol=1e-4, atol=1e-5)


def _powersgd_by_ddp(mesh: Mesh, rank: int) -> tuple[float, float]:
    """Train beside DDP's PowerSGD hook; the errors of both mean gradients, in a step whose matrices have low rank."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    weights = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    left = torch.randn(8, rank, generator=torch.Generator().manual_seed(2))
    right = torch.randn(rank, 12, generator=torch.Generator().manual_seed(3 + mesh.rank))
    gradient = left @ right  # of all ranks' matrices together, the rank is ``rank``
    net = nn.Linear(12, 8, bias=False)
    with torch.no_grad():
        net.weight.copy_(weights)
    ddp = nn.parallel.DistributedDataParallel(net)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        net.weight.grad = None
        (ddp(torch.eye(12)) * gradient.T).sum().backward()
    assert net.weight.grad is not None
    theirs = net.weight.grad
    zero = shard(
        own := nn.Sequential(nn.Linear(12, 8, bias=False)),
        mesh=mesh,
        policy=_roomy(method(PowerSGD, rank=rank)),
    )
    (own(torch.eye(12)) * gradient.T).sum().backward()
    mine = torch.cat([m.grad.flatten() for m in zero.masters if m.grad is not None])
    ours = zero.wire.all_gather_small(mine).flatten()[: theirs.numel()].view_as(theirs)
    exact = zero.wire.all_gather_small(gradient.flatten()).mean(0).view_as(theirs)
    return float((ours - exact).abs().max()), float((theirs - exact).abs().max())


def _roomy(own: Any) -> Policy:
    return Policy(weights=FP32, reduce=own, memory=MemoryLimits(max_padding=9.0))


@pytest.mark.long
def test_powersgd_is_as_exact_as_ddps_hook() -> None:
    """For gradients of rank 2, PowerSGD of rank 2 and DDP's hook find the exact mean, over gloo."""
    for ours, theirs in on_processes(Topology(1, 2), _powersgd_by_ddp, 2):
        assert ours < 1e-4
        assert theirs < 1e-4
