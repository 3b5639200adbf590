"""Local steps: groups train apart and meet, as DiLoCo in a single process; and where they meet, they are equal."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.checkpoint.save_load import load, save
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.parameters.gathered import GatheredParameters
from impl.plan.memory import memory
from impl.plan.traffic import Event, passes, predict
from impl.policy.own_method import method
from impl.policy.policy import Feedback, Policy
from impl.policy.topology import Topology
from impl.unit.outer_step import OuterStep
from impl.zero import ZeroError
from tests.support.diloco import diloco
from tests.support.gathers import Hops
from tests.support.models import Net
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import Training, batch, close, model, sgd, train

NET = model()
INT4, NOISY = parse("int4:8"), parse("int4:8:stochastic")
LAYOUTS = [
    (Topology(2, 2), "node"), (Topology(4, 1), 1), (Topology(4, 1), 2), (Topology(3, 2), "node"),
    (Topology(2, 2), 1), (Topology(2, 4), 2),
]  # fmt: skip


def local(group: Any, steps: int, **changes: Any) -> Policy:
    return replace(EXACT, group=group, local_steps=steps, **changes)


@pytest.mark.parametrize(("topology", "group"), LAYOUTS, ids=str)
@pytest.mark.parametrize("fragments", [1, 2])
def test_groups_train_as_diloco_in_one_process(topology: Topology, group: Any, fragments: int) -> None:
    """With AdamW inside and Nesterov outside, each group has the single process's weights, also between meetings."""
    policy = local(group, 3, local_fragments=fragments)
    for steps in (2, 7):
        _, wanted = diloco(NET, policy, topology, steps)
        size = policy.group_ranks(topology)
        for rank, (_, state, _) in enumerate(on_threads(topology, train, NET, policy, steps)):
            assert close(state, wanted[rank // size], 1e-4)


@pytest.mark.parametrize(("topology", "group"), LAYOUTS[:4], ids=str)
def test_groups_train_as_diloco_over_four_micro_batches(topology: Topology, group: Any) -> None:
    """A step over an accumulation of 4 is one step of a round, and the same in the single process."""
    policy = local(group, 2)
    _, wanted = diloco(NET, policy, topology, 4, 4)
    _, too_early = diloco(NET, replace(policy, local_steps=1), topology, 4, 4)
    size = policy.group_ranks(topology)
    for rank, (_, state, _) in enumerate(on_threads(topology, train, NET, policy, 4, 4)):
        assert close(state, wanted[rank // size], 1e-4)
        assert not close(state, too_early[rank // size], 1e-3)


@pytest.mark.parametrize(
    "changes",
    [{"stage": 1}, {"stage": 2}, {}, {"reduce_every": "step"}, {"memory": replace(ROOMY, persist_below=50)}],
    ids=str,
)
def test_every_stage_and_form_of_accumulation(changes: dict[str, Any]) -> None:
    """Gradients of 3 micro-batches, added up locally or in shards at any stage, give the single process's weights."""
    topology, policy = Topology(2, 2), local("node", 2, **changes)
    _, wanted = diloco(NET, policy, topology, 4, 3, sgd)
    for rank, state in enumerate(on_threads(topology, _with_sgd, policy, 4, 3)):
        assert close(state, wanted[rank // 2], 1e-4)


def _with_sgd(mesh: Mesh, policy: Policy, steps: int, micro_batches: int = 1) -> dict[str, Tensor]:
    return train(mesh, NET, policy, steps, micro_batches, optimize=sgd)[1]


@pytest.mark.parametrize(("topology", "group"), LAYOUTS, ids=str)
def test_a_meeting_after_each_step_of_plain_sgd_is_mics(topology: Topology, group: Any) -> None:
    """With one local step, SGD inside and outside, and no momentum, weights are those of MiCS, to rounding."""
    apart = local(group, 1, outer_rate=1.0, outer_momentum=0.0)
    mics = replace(apart, local_steps=None, outer_rate=0.7, outer_momentum=0.9)
    states, wanted = (on_threads(topology, _with_sgd, policy, 5) for policy in (apart, mics))
    assert all(close(state, wanted[0], 1e-5) for state in states)
    other = on_threads(topology, _with_sgd, replace(apart, outer_rate=0.9), 5)
    assert not close(other[0], wanted[0], 1e-3)


def test_a_forgotten_outer_momentum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If outer steps forget their momentum, weights after two meetings are not those of the single process."""
    take = OuterStep.take

    def forgetful(outer: OuterStep) -> None:
        outer._speed.zero_()
        take(outer)

    policy, topology = local("node", 2), Topology(2, 2)
    _, (wanted, _) = diloco(NET, policy, topology, 4)
    assert close(on_threads(topology, train, NET, policy, 4)[0][1], wanted, 1e-4)
    monkeypatch.setattr(OuterStep, "take", forgetful)
    assert not close(on_threads(topology, train, NET, policy, 4)[0][1], wanted, 1e-3)


CODED = Policy(
    group="node", weights=parse("int8:8"), gradients=(INT4, NOISY), local_steps=2, feedback=Feedback(hops="all"),
    memory=ROOMY,
)  # fmt: skip


def _masters(mesh: Mesh, policy: Policy, steps: int) -> list[list[Tensor]]:
    run, seen = Training(mesh, NET, policy), []
    for number in range(steps):
        run.step(number)
        seen.append([master.detach().clone() for master in run.zero.masters])
    return seen


@pytest.mark.parametrize(
    ("topology", "policy"),
    [(Topology(2, 2), CODED), (Topology(3, 2), CODED), (Topology(2, 4), replace(CODED, group=2, chunks=2))],
    ids=["2x2", "3x2", "2x4"],
)
def test_groups_are_equal_bit_by_bit_where_they_meet(topology: Topology, policy: Policy) -> None:
    """With quantised, stochastic and carried errors, all groups have the same masters after a meeting, only then."""
    ranks, size = on_threads(topology, _masters, policy, 4), policy.group_ranks(topology)
    for step, met in enumerate([False, True, False, True]):
        for rank in range(size, topology.world):
            pairs = zip(ranks[rank % size][step], ranks[rank][step], strict=True)
            assert all(torch.equal(*pair) for pair in pairs) == met


@pytest.mark.parametrize(
    "policy", [CODED, replace(CODED, local_fragments=2, stage=2)], ids=["whole", "fragments"]
)
@pytest.mark.parametrize(("topology", "group"), LAYOUTS[:4], ids=str)
@each_rank()
def test_bytes_and_memory_are_predicted(mesh: Mesh, policy: Policy, topology: Topology, group: Any) -> None:
    """The ledger of steps with and without a meeting, and the parts of memory, are the predicted ones."""
    run = Training(mesh, NET, replace(policy, group=group))
    zero, units = run.zero, [unit.geometry for unit in run.zero.units]
    events: list[Event] = []
    before = zero.wire.ledger.rows()
    for number in range(5):
        run.backward(number)
        zero.step(*run.optimizers, max_norm=0.1)
        run.optimizers[0].zero_grad()
        events += passes(zero.policy, norms=1)
        book = predict(zero.policy, topology, units, mesh.rank, events, buffer_bytes=zero.buffers.nbytes)
        sent = {
            key: (row.bytes - before[key].bytes if key in before else row.bytes)
            for key, row in zero.wire.ledger.rows().items()
        }
        assert {k: n for k, n in sent.items() if n} == {
            k: row.bytes for k, row in book.sent.items() if row.bytes
        }
    held, predicted = zero.memory(), memory(zero.policy, topology, units)
    for part in ("masters", "gradients", "outer", "feedback"):
        assert held[part] == predicted[part]


@pytest.mark.parametrize("changes", [{}, {"gather": method(Hops)}], ids=["hops", "own gather"])
@each_rank(2, 2)
def test_a_norm_is_that_of_a_group(mesh: Mesh, changes: dict[str, Any]) -> None:
    """Ranks of a group clip by the norm of their group's mean gradient, which is another in each group."""
    run = Training(mesh, NET, local("node", 4, **changes))
    run.backward(0)
    norm = run.zero.grad_norm().item()
    whole = copy.deepcopy(NET)
    for rank in range(2 * (mesh.rank // 2), 2 * (mesh.rank // 2) + 2):
        (whole(batch(0, rank)) / 2).backward()
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 1e9).item()
    assert norm == pytest.approx(wanted, rel=1e-5)
    assert len(set(run.zero.wire.all_gather_small(torch.tensor([norm])).view(-1).tolist())) == 2


@each_rank(2, 2)
def test_a_meeting_waits_for_all_optimizers(mesh: Mesh) -> None:
    """Two optimizers that step one after the other are one step; one that is never stepped is an error."""
    run, (matrices, vectors) = _two_optimizers(mesh, local("node", 1))

    def equal() -> bool:
        (unit, *_) = run.zero.units
        masters = run.zero.wire.all_gather_small(unit.master_shard.held)
        return torch.equal(masters[mesh.rank], masters[(mesh.rank + 2) % 4])

    run.backward(0)
    matrices.step()
    assert not equal()
    vectors.step()
    assert equal()
    run.backward(1)
    matrices.step()
    run.backward(2)
    with pytest.raises(ZeroError, match="optimizers have stepped only some of the masters"):
        matrices.step()


def _two_optimizers(mesh: Mesh, policy: Policy) -> tuple[Training, list[torch.optim.Optimizer]]:
    """A model whose matrices have one optimizer, and whose vectors have another."""
    run = Training(mesh, NET, policy, group_of=lambda _, parameter: int(parameter.dim() < 2))
    return run, [torch.optim.SGD([group], lr=0.1) for group in run.zero.param_groups()]


@each_rank(2, 2)
def test_a_meeting_does_not_wait_for_gradients_that_were_cleared(mesh: Mesh) -> None:
    """If one optimizer's gradients are cleared before the other steps, the other's step alone completes each step."""
    run, (matrices, vectors) = _two_optimizers(mesh, local("node", 1))
    for number in range(2):
        run.backward(number)
        vectors.zero_grad()
        matrices.step()
        matrices.zero_grad()
        (unit, *_) = run.zero.units
        masters = run.zero.wire.all_gather_small(unit.master_shard.held)
        assert torch.equal(masters[mesh.rank], masters[(mesh.rank + 2) % 4])


@pytest.mark.parametrize("saved", [local("node", 1), EXACT], ids=["same policy", "other policy"])
@each_rank(2, 2)
def test_a_load_between_two_optimizers_begins_anew(mesh: Mesh, tmp_path: Path, saved: Policy) -> None:
    """A load drops the gradients that the second optimizer has not used, and then every step counts as the first."""
    save(tmp_path, _two_optimizers(mesh, saved)[0].zero)
    run, optimizers = _two_optimizers(mesh, local("node", 1))
    run.backward(0)
    optimizers[0].step()
    load(tmp_path, run.zero)
    run.backward(1)
    for optimizer in optimizers:
        optimizer.step()


@each_rank(2, 2)
def test_loaded_and_written_weights_move_the_anchor(mesh: Mesh) -> None:
    """A state dict, or a write under GatheredParameters, is the weight that groups start from, in all groups."""
    run = Training(mesh, NET, local("node", 2, outer_momentum=0.0, outer_rate=1.0), optimize=sgd)
    run.step(0)
    other = {name: value + 1 for name, value in model().state_dict().items()}
    run.zero.load_full_state_dict(other)
    weight = run.net.head.weight
    with GatheredParameters(weight, modifier_rank=0):
        weight.data.fill_(0.25)
    for unit in run.zero.units:
        shard = unit.master_shard
        assert torch.equal(unit.outer.state()["anchor"], shard.master)
    assert torch.equal(run.zero.full_state_dict()["head.weight"], torch.full_like(NET.head.weight, 0.25))


def _fragmented(mesh: Mesh, depth: int) -> str:
    with pytest.raises(ValueError, match="local_fragments=9") as error:
        Training(mesh, model(Net, depth=depth), local("node", 9, local_fragments=9))
    return str(error.value)


def test_more_fragments_than_units_are_refused_by_shard() -> None:
    """A model of 4 units cannot be dealt into 9 fragments; the error says how many are possible."""
    for text in on_threads(Topology(2, 1), _fragmented, 3):
        assert "is more than the number of the model's units with trained parameters: set at most 4" in text
