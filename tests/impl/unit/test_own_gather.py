"""A gather of one's own: the engine drives it, checks what it returns, counts its bytes and saves its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.differences import Differences
from impl.checkpoint import save_load
from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.plan.traffic import Sent, passes, predict
from impl.policy.own_method import GatherInfo, MethodError, method, planned_gathers
from impl.policy.policy import BF16, FP32, MemoryLimits, Offload, Policy, PolicyError, parse_budget
from impl.policy.presets import preset
from impl.policy.shard_layout import ParameterSpec, lay_out
from impl.policy.topology import Topology
from impl.quantized_collectives import quantized_all_gather
from impl.simulate import simulate
from impl.unit.own_gather import GatherMethod, OwnWeightGather
from tests.support.gathers import Halved, Hops, Kept, Whole
from tests.support.methods import Mean
from tests.support.models import Odd
from tests.support.ranks import on_processes
from tests.support.training import Training, batch, model, single

EXACT = (FP32, FP32)


@pytest.mark.parametrize("kind", [Whole, Hops, Kept])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"stage": 1}, {"stage": 2}, {"group": "node"}, {"reduce_every": "step"}, {"compute": "bf16"},
        {"memory": MemoryLimits(persist_below=20)}, {"memory": MemoryLimits(prefetch=0, max_reuse=0)},
        {"memory": MemoryLimits(max_reuse=10**9)}, {"reduce": method(Mean)},
    ],
    ids=str,
)  # fmt: skip
def test_an_exact_gather_trains_as_hops_do(kind: type[GatherMethod], changes: dict[str, Any]) -> None:
    """With any stage, placement and accumulation, losses are those of a gather in hops, to the bit."""

    def body(mesh: Mesh, gather: Any) -> list[float]:
        policy = Policy(
            weights=FP32 if "compute" not in changes else BF16, gradients=EXACT, gather=gather, **changes
        )
        run = Training(mesh, model(), policy)
        return [run.step(number, 2) for number in range(4)]

    assert simulate(2, 2)(body, method(kind)) == simulate(2, 2)(body, "hierarchical")


def test_frozen_units_are_gathered_in_hops() -> None:
    """A model with frozen, empty and unused parameters trains as with hops, and frozen units have no method."""

    def body(mesh: Mesh, gather: Any) -> list[float]:
        policy = Policy(weights=FP32, gradients=EXACT, gather=gather, memory=MemoryLimits(max_padding=1e9))
        run = Training(mesh, model(Odd), policy, width=7)
        for unit in run.zero.units:
            own = isinstance(unit.weight_gather, OwnWeightGather)
            assert own == (unit.geometry.trainable and gather != "hierarchical")
        return [run.step(number) for number in range(3)]

    assert simulate(1, 3)(body, method(Whole)) == simulate(1, 3)(body, "hierarchical")


GATHERS = [method(Whole), method(Kept), method(Differences), method(Differences, block=16)]


@pytest.mark.parametrize("own", GATHERS, ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_are_those_that_the_class_declares(own: Any, stage: Any) -> None:
    """The ledger of some steps equals the prediction from the declared messages of forward and backward gathers."""

    def body(mesh: Mesh) -> set[str]:
        policy = Policy(stage=stage, gather=own, order_every=0)
        run = Training(mesh, model(), policy)
        zero, events = run.zero, list[Any]()
        for number in range(3):
            run.step(number, 2)
            events += passes(policy, micro_batches=2)
            with torch.no_grad():
                run.net(batch(9, mesh.rank))
            events.append("evaluate")
        zero.weights_changed()
        run.step(3)
        events += ["changed", *passes(policy)]
        gathers: dict[str, Any] = {}
        for unit in zero.units:
            gather = unit.weight_gather
            assert isinstance(gather, OwnWeightGather)
            gathers[unit.geometry.name] = lambda info, own=gather.own: own.messages(mesh.topology, info)
        units = [unit.geometry for unit in zero.units]
        kept: Any = {"gathers": gathers, "buffer_bytes": zero.buffers.nbytes}
        sent = predict(policy, mesh.topology, units, mesh.rank, events, **kept).sent
        found, expected = (
            {
                key: row
                for key, row in rows.items()
                if key.purpose in ("weights", "gradients") and row != Sent(0, 0)
            }
            for rows in (zero.wire.ledger.rows(), sent)
        )
        assert found == expected
        planned = planned_gathers(own, mesh.topology, units)
        assert (
            predict(policy, mesh.topology, units, mesh.rank, events, **kept | {"gathers": planned}).sent
            == sent
        )
        return {key.phase for key in found if key.purpose == "weights"}

    for phases in simulate(2, 2)(body):
        backward = stage == 3 and own.definition is Whole
        assert phases == {"forward", "evaluate"} | ({"backward"} if backward else set())


@pytest.mark.parametrize("own", GATHERS, ids=str)
def test_a_checkpoint_resumes_to_the_bit(own: Any, tmp_path: Any) -> None:
    """Losses after loading equal those of a run that was not interrupted, and a rehearsal changes nothing."""

    def body(mesh: Mesh) -> tuple[list[float], list[float]]:
        policy = Policy(gather=own)
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


def test_a_checkpoint_of_another_gather_names_the_dropped_state(tmp_path: Any) -> None:
    """A run with other ranks or another gather takes the weights, and says that the class's state was dropped."""

    def save(mesh: Mesh) -> None:
        run = Training(mesh, model(), Policy(gather=method(Differences)))
        run.step(0)
        save_load.save(tmp_path, run.zero, run.optimizers)

    def load(mesh: Mesh) -> tuple[str, ...]:
        run = Training(mesh, model(), Policy())
        dropped = save_load.load(tmp_path, run.zero, run.optimizers).dropped
        assert math.isfinite(run.step(1))
        return dropped

    simulate(2, 2)(save)
    for dropped in simulate(2, 2)(load):
        assert any(
            line.startswith("state of examples.differences:Differences: saved with") for line in dropped
        )


def test_gathers_are_told_apart() -> None:
    """A class is told the pass, how the weights have changed, and the steps since they were loaded."""
    told: dict[int, list[GatherInfo]] = {rank: [] for rank in range(2)}

    class Telling(Whole):
        def start(self, weights: Tensor, gather: GatherInfo) -> None:
            super().start(weights, gather)
            if self.unit.name.endswith("blocks.1"):
                told[self.wire.rank].append(gather)

    def body(mesh: Mesh) -> None:
        run = Training(mesh, model(), Policy(gather=method(Telling)))
        run.step(0, 2)
        with torch.no_grad():
            run.net(batch(0, mesh.rank))
        run.step(1)
        run.zero.weights_changed()
        run.zero.forget_gathered()
        run.backward(2)
        run.zero.drop_gradients()
        run.backward(2)

    simulate(1, 2)(body)
    first = [("forward", "loaded", 0), ("backward", "unchanged", 0)]
    assert told[0] == told[1]
    assert told[0] == [
        *first, ("forward", "unchanged", 0), ("backward", "unchanged", 0),
        ("evaluate", "stepped", 1), ("forward", "unchanged", 1), ("backward", "unchanged", 1),
        *first, *first,
    ]  # fmt: skip


def test_messages_of_gathers_that_are_under_way_advance() -> None:
    """While a unit is about to be used, the gathers of the units after it post their next messages."""
    advanced: list[str] = []

    class Noting(Hops):
        def start(self, weights: Tensor, gather: GatherInfo) -> None:
            super().start(weights, gather)
            self.done = False

        def advance(self) -> None:
            if self.wire.rank == 0 and not self.done:
                advanced.append(self.unit.name)
            super().advance()

        def finish(self) -> Tensor:
            self.done = True
            return super().finish()

    def body(mesh: Mesh) -> list[float]:
        run = Training(mesh, model(depth=4), Policy(gather=method(Noting)))
        return [run.step(number) for number in range(2)]

    def plain(mesh: Mesh) -> list[float]:
        run = Training(mesh, model(depth=4), Policy(gather=method(Hops)))
        return [run.step(number) for number in range(2)]

    losses = simulate(2, 2)(body)
    assert advanced
    assert losses == simulate(2, 2)(plain)


def _differences_of_one_process(weights: list[Tensor], shard: int, block: int) -> list[Tensor]:
    """Weights (P,) that ranks find in each step: the copy plus int8 differences, with a scale for each block."""
    copy, found = torch.zeros_like(weights[0]), []
    for step in weights:
        for start in range(0, len(step), shard):
            for first in range(start, start + shard, block):
                part = slice(first, min(first + block, start + shard))
                difference = step[part] - copy[part]
                scale = max(float(difference.abs().max() / 127), 1e-38)
                copy[part] += (difference / scale).round().clamp(-127, 127) * scale
        found.append(copy.clone())
    return found


def test_the_example_equals_a_reference_of_one_process() -> None:
    """Over five optimizer steps, int8 differences find the weights that a plain program of one process finds."""
    masters: dict[int, list[Tensor]] = {}

    class _Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(12, 8, bias=False)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x).square().mean()

    def body(mesh: Mesh) -> tuple[list[Tensor], int]:
        policy = Policy(gather=method(Differences, block=16), memory=MemoryLimits(max_padding=1.0))
        run = Training(mesh, model(_Linear), policy, width=12)
        (unit,) = (unit for unit in run.zero.units if unit.geometry.slots)
        found, mine = [], masters.setdefault(mesh.rank, [])
        for number in range(5):
            mine.append(unit.master_shard.master.detach().clone())
            run.step(number)
            assert isinstance(unit.weight_gather, OwnWeightGather)
            found.append(unit.weight_gather.own.state()["gather.copy"])
        return found, unit.geometry.shard

    ranks = simulate(2, 2)(body)
    weights = [torch.cat([masters[rank][step] for rank in range(4)]) for step in range(5)]
    expected = _differences_of_one_process(weights, ranks[0][1], 16)
    for found, _ in ranks:
        for step, whole in enumerate(expected):
            torch.testing.assert_close(found[step], whole, rtol=0, atol=1e-7)


def test_differences_train_nearly_as_one_process() -> None:
    """Losses with int8 differences follow those of a single process, from which int8 alone would part further."""

    def body(mesh: Mesh) -> list[float]:
        run = Training(mesh, model(), Policy(gather=method(Differences), gradients=EXACT))
        return [run.step(number) for number in range(8)]

    losses = [math.fsum(step) / 4 for step in zip(*simulate(2, 2)(body), strict=True)]
    assert losses == pytest.approx(single(model(), 4, 8), rel=2e-2)


def test_inference_mode_leaves_a_state_that_training_can_use() -> None:
    """An evaluation in inference mode before and between steps does not disturb a class that keeps tensors."""

    def body(mesh: Mesh) -> list[float]:
        run, losses = Training(mesh, model(), Policy(gather=method(Differences))), []
        for number in range(3):
            with torch.inference_mode():
                run.net(batch(5, mesh.rank))
            losses.append(run.step(number))
        return losses

    assert all(math.isfinite(loss) for rank in simulate(1, 2)(body) for loss in rank)


def _losses(mesh: Mesh) -> list[float]:
    run = Training(mesh, model(), Policy(gather=method(Differences)))
    return [run.step(number) for number in range(3)]


@pytest.mark.long
def test_processes_find_what_threads_find() -> None:
    """Over gloo, losses with the example equal those of thread ranks to the bit."""
    assert on_processes(Topology(2, 2), _losses) == simulate(2, 2)(_losses)


class Wrong(GatherMethod):
    """Errs as its argument says."""

    def __init__(self, unit: Any, wire: Any, how: str) -> None:
        super().__init__(unit, wire)
        self.how = how
        if how == "made":
            raise ValueError("cannot be made")

    def start(self, weights: Tensor, gather: GatherInfo) -> None:
        if self.how == "one rank" and self.wire.rank == 2:
            raise ValueError("no luck\nat all")
        sent = self.wire.all_gather(weights.sum())
        if self.how == "hang" and self.wire.rank == 1:
            self.wire.all_gather(weights.sum()).wait()
        sent.wait()

    def finish(self) -> Any:
        whole = torch.zeros(self.unit.numel, dtype=self.wire.dtype)
        return {
            "shape": whole[:-1], "shard": whole[self.unit.own], "type": whole.double(), "nothing": None,
            "nan": whole / 0,
        }.get(self.how, whole)  # fmt: skip

    def state(self) -> Any:
        return [1] if self.how == "state" else {}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("made", "its constructor raised ValueError: cannot be made"),
        ("one rank", r"on rank 2, unit '.*': start\(\) raised ValueError: no luck(\n|$)"),
        (
            "shape",
            r"finish\(\) returned float32 of shape \(\d+,\), expected float32 of shape \(\d+,\): return the weights of",
        ),
        (
            "shard",
            r"finish\(\) returned float32 of shape \(\d+,\), expected float32 of shape \(\d+,\): return the weights of",
        ),
        ("type", r"finish\(\) returned float64 of shape"),
        ("nothing", r"finish\(\) returned NoneType, expected a tensor"),
        ("nan", r"finish\(\) returned NaN or infinity, although this rank's weights are finite"),
        ("state", r"state\(\) returned list, expected a dict of tensors by name"),
    ],
)
def test_errors_name_class_rank_and_unit(how: str, message: str) -> None:
    """Whatever a class does wrong, the error is one line with the class, the rank and the unit."""

    def body(mesh: Mesh) -> None:
        run = Training(mesh, model(), Policy(gather=method(Wrong, how=how)))
        run.zero.communication_state()
        run.step(0)

    with pytest.raises(ZeroError, match=message) as caught:
        simulate(2, 2)(body)
    text = str(caught.value.args[0])  # pytest's text has the notes too
    assert "\n" not in text
    assert f"method {Wrong.__module__}:Wrong(how={how!r}) on rank " in text
    assert "unit '" in text


def test_a_rank_that_sends_more_than_others_is_reported() -> None:
    """If a rank waits for a message that no other rank sends, the wire's error names what each rank waits for."""

    def body(mesh: Mesh) -> None:
        Training(mesh, model(), Policy(gather=method(Wrong, how="hang"))).step(0)

    with pytest.raises(
        RuntimeError, match=r"exchange 3, .*weights blocks.0\nthe ranks' exchanges first"
    ) as caught:
        simulate(2, 2)(body)
    assert f"() of method {Wrong.__module__}:Wrong(how='hang')" in caught.value.__notes__[0]


def test_a_class_in_the_wrong_field_is_refused() -> None:
    """A class that reduces cannot gather, nor one that gathers reduce; the error names the field to use."""
    with pytest.raises(
        PolicyError,
        match=r"Mean: has start\(gradient\), so it reduces .*: name Mean in reduce instead of gather",
    ):
        Policy(gather=method(Mean))
    with pytest.raises(
        PolicyError, match=r"Whole: has start\(weights, gather\), .*: name Whole in gather instead of reduce"
    ):
        Policy(reduce=method(Whole))

    def body(mesh: Mesh) -> None:  # a name is imported here only
        Training(mesh, model(), Policy(gather="tests.support.methods:Mean"))  # type: ignore[arg-type]

    with pytest.raises(
        ZeroError,
        match=r"method tests.support.methods:Mean: .* name Mean in reduce instead of gather \(on rank \d, unit '",
    ):
        simulate(1, 2)(body)
    geometry = lay_out("u", [ParameterSpec("w", (8,))], grain=1, world=4, max_padding=1.0)
    with pytest.raises(MethodError, match="name Mean in reduce instead of gather"):
        planned_gathers(method("tests.support.methods:Mean"), Topology(2, 2), [geometry])
    with pytest.raises(MethodError, match="only a class that gathers weights can promise the law 'settles'"):
        method(type("Settled", (Mean,), {"laws": ["settles"], "settles_after": len}))
    with pytest.raises(MethodError, match="has no method 'settles_after', which the law 'settles' needs"):
        method(type("Unsettled", (Halved,), {"laws": ["settles"]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": 0}, "needs stage 1 to 3"),
        ({"secondary": "node"}, "does not allow secondary='node', since hpZ keeps a copy"),
        ({"weights": preset("qwz").weights, "planes": 2}, "does not allow planes=2"),
        ({"offload": Offload(optimizer=1.0)}, "does not allow offload, which keeps masters"),
        ({"offload": Offload(weights=0.5)}, "does not allow offload, which keeps masters"),
        ({"budget": parse_budget("weights every 5 of int3:128")}, "does not allow budget 'weights every 5"),
    ],
)
def test_what_a_gather_does_not_allow_is_refused(changes: dict[str, Any], message: str) -> None:
    """Fields that have no meaning with a gather of one's own are refused in one line that says what to do."""
    with pytest.raises(PolicyError, match=message) as caught:
        Policy(gather=method(Whole), **changes)
    assert "or set gather='hierarchical'" in str(caught.value) or "remove weights from the budget" in str(
        caught.value
    )


def test_a_name_is_read_and_not_imported() -> None:
    """A policy takes the class's name as text, and imports it only when a model is sharded."""
    policy = Policy(gather="nowhere:Class")  # type: ignore[arg-type]
    assert str(policy.own_gather) == "nowhere:Class"
    assert policy == Policy(gather=method("nowhere:Class"))
    with pytest.raises(
        PolicyError, match=r"gather = 'round': expected one of flat, hierarchical, 'module:Class'"
    ):
        Policy(gather="round")  # type: ignore[arg-type]

    def body(mesh: Mesh) -> None:
        Training(mesh, model(), policy)

    with pytest.raises(ZeroError, match=r"nowhere:Class: cannot import 'nowhere': .* \(on rank \d, unit '"):
        simulate(1, 2)(body)


def test_a_plain_collective_takes_no_class() -> None:
    """``quantized_all_gather`` has no units, and says so."""

    def body(mesh: Mesh) -> None:
        quantized_all_gather(torch.zeros(8), "int8:8", mesh, gather="mine:Class")  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="names a method of your own, which needs"):
        simulate(1, 2)(body)
