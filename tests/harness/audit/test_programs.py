"""Tests that programs of many kinds, audited on real ranks over gloo, send the bytes of their closed forms."""

from __future__ import annotations

import os
from typing import Any, Final
from unittest import mock

import pytest
import torch.distributed as dist

from docs.audited import programs
from docs.audited.__main__ import audit_on_hosts, counters
from harness.audit import wire
from harness.audit.inside import Found, audit
from harness.audit.schemes import NONE
from harness.audit.witness import Witness
from impl.comm.mesh import Mesh
from impl.plan.traffic import passes, predict
from impl.policy.topology import Topology
from tests.support.ranks import on_processes

STEPS: Final = 4
M: Final = sum(parameter.numel() for parameter in programs.Net().parameters())
KEPT: Final = 2 * programs.WIDTH**2  # parameters of FSDP2's root, which stays gathered
OURS: Final = {
    "zero3": "hierarchical ZeRO-3 (this project's engine)",
    "zeropp": "ZeRO++ with qwZ, hpZ, qgZ (this project's engine)",
}
NAMES: Final = {
    "ddp": ("DDP", 4 * M),
    "ddp_static_graph": ("DDP", 4 * M),
    "ddp_bf16_hook": ("DDP", 2 * M),
    "ddp_no_sync": ("DDP", 4 * M),
    "fsdp2": ("ZeRO-3 (FSDP2)", 4 * (3 * M - KEPT)),
    "fsdp2_kept": ("ZeRO-3 (FSDP2, weights kept for backward)", 4 * 2 * M),
    "fsdp2_hsdp": ("HSDP of 2 shards (FSDP2)", 4 * (3 * M - KEPT + M // 2)),
    "fsdp2_mixed": ("ZeRO-3 (FSDP2)", 2 * (2 * M - KEPT) + 4 * M),
    "fsdp2_two_groups": ("HSDP of 2/4 shards (FSDP2)", 4 * (3 * M - KEPT + programs.WIDTH**2 * 8 // 2)),
}
"""The scheme of each program, and the bytes of its messages in a step."""


def _audited(mesh: Mesh, names: tuple[str, ...]) -> dict[str, Any]:
    """What each program sent on this rank: its scheme, and the rows of its last step."""
    found = {}
    for name in names:
        with audit(ranks_per_node=2) as audited:
            engine = programs.PROGRAMS[name](STEPS)
        found[name] = (*_of(audited), _predicted(engine, mesh) if name.startswith("zero") else None)
    with mock.patch.object(Witness, "sees", return_value=False), audit(ranks_per_node=2) as audited:
        programs.fsdp2(STEPS)
    found["wrapper"] = _of(audited)
    os.environ["QUANTISE"] = "0"
    with audit(ranks_per_node=2) as audited:
        programs.quantised_gather(STEPS)
    found["expectation"] = audited.check("all_gather int8 >= 0.4 M")
    return found


def _of(audited: Found) -> tuple[Any, ...]:
    report, rank = audited.report, audited.calls.ranks[0]
    assert report.steps == [1, 2, 3, 4]
    rows = rank.rows[STEPS]
    sent = [
        wire.sent(rank.number, key, count, audited.calls.group(rank, key.group), audited.calls.topology)
        for key, count in rows.items()
    ]
    totals = sum(each.inside for each in sent), sum(each.between for each in sent)
    sizes = [(key.operation, key.phase, key.dtype, key.source, count) for key, count in rows.items()]
    scheme = audited.scheme
    assert scheme is not None
    return scheme.name, scheme.measured, scheme.expected, sizes, totals


def _predicted(engine: Any, mesh: Mesh) -> tuple[int, int]:
    """Bytes that this rank sends inside and between nodes in a step, by :mod:`impl.plan.traffic`."""
    policy, units = engine.units[0].policy, [unit.geometry for unit in engine.units]
    events = [*passes(policy) * 2]
    sent = predict(policy, mesh.topology, units, mesh.rank, events).sent
    first = predict(policy, mesh.topology, units, mesh.rank, passes(policy)).sent
    links = ("intra", "inter")
    both = [
        [sum(s.bytes for key, s in book.items() if key.link == link) for link in links]
        for book in (sent, first)
    ]
    return both[0][0] - both[1][0], both[0][1] - both[1][1]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """The results of all ranks, of programs that run one after another in the same processes."""
    names = (*NAMES, "zero3", "zeropp", "quantised_gather", "pipeline")
    return on_processes(Topology(2, 2), _audited, names)


@pytest.mark.long
@pytest.mark.needs("DeepSpeed")
def test_deepspeed_sends_the_bytes_of_its_stages() -> None:
    """Stages 1 and 2 all-reduce gradients and gather new weights; stage 3 gathers twice and reduces once."""
    stages = {"deepspeed_1": 2, "deepspeed_2": 2, "deepspeed_3": 3}
    for rank in on_processes(Topology(2, 2), _audited, tuple(stages)):
        for name, times in stages.items():
            found, measured, expected, *_ = rank[name]
            assert (found, measured, expected) == (
                "ZeRO-3" if times == 3 else "ZeRO-1 or ZeRO-2",
                4 * times * M,
                4 * times * M,
            )


@pytest.mark.parametrize("name", NAMES)
def test_messages_are_those_of_the_scheme(results: list[dict[str, Any]], name: str) -> None:
    """The bytes of all ranks equal the closed form exactly, and the form what its formula says."""
    for rank in results:
        found, measured, expected, *_ = rank[name]
        assert (found, measured, expected) == (NAMES[name][0], NAMES[name][1], NAMES[name][1])


def test_the_wrapper_sees_what_the_recorder_sees_of_python(results: list[dict[str, Any]]) -> None:
    """FSDP2's calls, over a backend without a recorder, have the same operations, phases, types and sizes."""
    for rank in results:
        both = [
            sorted((operation, phase, dtype, count) for operation, phase, dtype, _, count in rank[name][3])
            for name in ("wrapper", "fsdp2")
        ]
        assert both[0] == both[1]
        assert {size[3] for size in rank["wrapper"][3]} == {"wrapper"}


def test_a_pipeline_sends_activations_and_their_gradients(results: list[dict[str, Any]]) -> None:
    """Each rank sends one tensor to the other node: activations in forward, or their gradients in backward."""
    nbytes = 4 * programs.BATCH * programs.WIDTH
    for rank in results:
        name, _, _, sizes, totals = rank["pipeline"][:5]
        assert name == NONE
        assert sorted(size[0] for size in sizes) == ["barrier", "recv", "send"]
        assert {size[3] for size in sizes if size[0] != "barrier"} == {"wrapper"}
        assert totals == (0, nbytes)


@pytest.mark.parametrize("name", ["zero3", "zeropp"])
def test_our_engine_sends_what_its_plan_predicts(results: list[dict[str, Any]], name: str) -> None:
    """Inside and between nodes, the bytes of a step equal those of impl.plan.traffic, and the scheme is named."""
    for rank in results:
        found, measured, expected, _, totals, predicted = rank[name]
        assert totals == predicted
        assert (found, measured, expected) == (OURS[name], sum(predicted), sum(predicted))


def test_a_quantised_gather_is_of_its_type(results: list[dict[str, Any]]) -> None:
    """All weights are gathered once in int8."""
    for rank in results:
        (size,) = (size for size in rank["quantised_gather"][3] if size[2] == "int8")
        assert (size[0], size[4].elements, size[4].bytes) == ("all_gather", M, M)


def test_a_gather_that_silently_is_not_quantised_breaks_an_expectation(results: list[dict[str, Any]]) -> None:
    """The line says in which type the weights were gathered."""
    for number, rank in enumerate(results):
        (line,) = rank["expectation"]
        assert line.startswith(f"broken: all_gather int8 >= 0.4 M: rank {number} has 0 M in step 1")
        assert "float32" in line


@pytest.mark.long
@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2_hsdp", "zeropp", "pipeline"])
def test_interfaces_count_what_the_calls_send(name: str) -> None:
    """On two nodes in network namespaces, each interface's counter is within 2 % of the calls' bytes.

    On a loaded machine the ranks of a node end a step at different times, and the counter of this step is known only
    to within what they send meanwhile.
    """
    calls = audit_on_hosts(name)
    assert [calls.topology.nodes[rank.number] for rank in calls.ranks] == [0, 0, 1, 1]
    counted = counters(calls)
    assert [row["node"] for row in counted] == ["0", "1"]
    for row in counted:
        away = abs(row["counted"] - row["expected"]) - row["uncertain"]
        assert away <= 0.02 * row["expected"], counted


def test_nothing_is_left_behind() -> None:
    """After the block, torch's methods and functions are its own again."""
    before = {**vars(dist.ProcessGroup)}, dist.destroy_process_group
    with audit():
        assert vars(dist.ProcessGroup)["allreduce"] is not before[0]["allreduce"]
    assert ({**vars(dist.ProcessGroup)}, dist.destroy_process_group) == before
