"""``zeropp bench`` times what it says it does, keeps raw seconds, and refuses in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import cli
from harness.bench import codecs as bench_codecs
from harness.bench import command, deepspeed_peer
from harness.bench import engine as bench_engine
from harness.bench import overlap as bench_overlap
from harness.bench.collectives import any_inside, together
from harness.cluster import link
from harness.cluster.rank import Progress, Rank
from harness.records import bench_record, engine_goals, overlap_goals
from harness.records.bench_record import (
    Bench,
    BenchError,
    CodecSample,
    CollectiveSample,
    OverlapHops,
    OverlapStep,
)
from harness.records.record import RecordError
from impl import ops
from impl.codecs.codec import parse
from impl.plan.topology import Axis, Topology
from tests.harness.test_cli import folder, refused
from tests.report.bench.bench_records import codecs, collectives, engine, overlap

__all__ = ["folder"]  # a fixture


def local() -> Rank:
    """A process of its own, as the benchmark of codecs sees it."""
    return Rank(0, None, None, None, lambda _: None, 1)  # type: ignore[arg-type]


BAD = {
    "no codec": (("codecs", "--codec", "int9:64"), "2 to 8 bits"),
    "no backend": (("codecs", "--backend", "gpu"), "unknown backend 'gpu'"),
    "no type": (("codecs", "--kind", "fp64"), "unknown type of elements 'fp64'"),
    "no size": (("codecs", "--megabytes", "0"), "--megabytes"),
    "no sizes": (("collectives", "--megabytes", "1,x"), "whole MiB"),
    "negative size": (("collectives", "--megabytes", "-4"), "whole MiB"),
    "a rate without unit": (("collectives", "--rate", "50"), "with a unit"),
    "one rank": (("collectives", "--nodes", "1", "--ranks", "1"), "2 ranks at least"),
    "no such benchmark": (("codec",), "No such command"),
    "no contender": (("engine", "--contender", "megatron"), "unknown contender 'megatron'"),
    "no model": (("engine", "--model", "gpt-huge"), "unknown model 'gpt-huge'"),
    "one rank alone": (("engine", "--nodes", "1", "--ranks", "1"), "expected 2 to 64 ranks"),
    "a rate of no topology": (("engine", "--rate", "1 Gbit/s"), "say --nodes and --ranks with it"),
    "no model of overlap": (("overlap", "--model", "bert-small"), "unknown model 'bert-small'"),
    "one chunk": (("overlap", "--chunks", "1"), "--chunks"),
    "a link of one node": (("engine", "--ranks", "2", "--rate", "1 Gbit/s"), "one node has no link"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    """What cannot be measured is one line with status 2, and nothing is touched."""
    assert words in refused(folder, capsys, "bench", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_backend_that_is_not_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that is asked for and missing is refused with the reason, never left out."""
    error = refused(folder, capsys, "bench", "codecs", "--backend", "cuda")
    assert "backend 'cuda' is not here: torch finds no CUDA device" in error


def test_other_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records of another machine or code are not joined."""
    bench_record.write(folder / "results" / "bench-codecs", codecs())
    assert "another machine or code" in refused(folder, capsys, "bench", "codecs")


def test_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run leaves one record of raw seconds in pairs, prints its table and draws the page."""
    arguments = ["bench", "codecs", "--codec", "int8:64", "--codec", "bf16", "--megabytes", "1"]
    assert cli.main([*arguments, "--seconds", "0.01"]) == cli.OK
    out, _ = capsys.readouterr()
    assert "int8:64" in out
    assert out.endswith("results/bench-codecs/report.html\n")
    assert (folder / "results" / "bench-codecs" / "report.html").exists()
    (found,) = bench_record.read_all(folder / "results" / "bench-codecs")
    own = [sample for sample in found.codecs if sample.codec == "int8:64" and sample.backend != "reference"]
    assert {sample.operation for sample in own} <= set(bench_codecs.OPERATIONS)
    for sample in found.codecs:
        assert len(sample.seconds) >= bench_codecs.FEWEST_ROUNDS
    assert cli.main(["show", "bench-codecs"]) == cli.OK
    assert "int8:64" in capsys.readouterr().out
    assert cli.main(["report", "bench-codecs"]) == cli.OK


def test_moved_bytes() -> None:
    """Bytes moved are those that each operation must read and write once."""
    setting = bench_codecs.Setting(("int4:256",), ("reference",), ("fp32",), 1, 1, 0.0)
    samples = {sample.operation: sample for sample in bench_codecs.measure(local(), setting)}
    elements, frame = 4 << 18, parse("int4:256").frame_bytes(1 << 18)
    assert {name: sample.moved_bytes for name, sample in samples.items()} == {
        "encode": elements + frame,
        "decode": elements + frame,
        "decode_sum": 4 * frame + elements,
        "decode_sum_encode": 5 * frame,
        "encode_carried": 3 * elements + frame,
    }


def test_every_backend_serves_what_it_is_timed_for() -> None:
    """A codec is timed only on backends that have kernels for it, and on the reference."""
    here, missing = bench_codecs.found()
    assert set(here) | set(missing) == set(bench_codecs.BACKENDS)
    names = tuple(name for name in here if name in ("cpu", "reference"))
    setting = bench_codecs.Setting(("int8:64", "mxfp4"), names, ("fp32",), 1, 1, 0.0)
    said: list[Progress] = []
    rank = Rank(0, None, None, None, said.append, 1)  # type: ignore[arg-type]
    for sample in bench_codecs.measure(rank, setting):
        assert ops.operations_of(sample.backend).supports(parse(sample.codec))
    assert said[-1].step < said[-1].steps


@given(st.integers(1, 15), st.integers(15, 40))
def test_rounds_are_spread(rounds: int, most: int) -> None:
    """An operation takes part in as many rounds as it has, wherever they fall."""
    timed = bench_codecs.Timed.__new__(bench_codecs.Timed)
    timed.rounds = rounds
    assert sum(timed.takes_part(index, most) for index in range(most)) == rounds


def test_together() -> None:
    """A round lasts as long as the slowest rank's, and all ranks' bytes count."""
    one = collectives().collectives[0]
    fast = one.model_copy(update={"seconds": [1.0, 2.0], "reference_seconds": [3.0, 3.0], "sent_intra": 5})
    slow = one.model_copy(update={"seconds": [2.0, 1.0], "reference_seconds": [4.0, 1.0], "sent_intra": 6})
    (found,) = together([[fast], [slow]])
    assert (found.seconds, found.reference_seconds) == ([2.0, 2.0], [4.0, 3.0])
    assert found.sent_intra == 11


@pytest.mark.parametrize(("ratio", "met"), [(1.0, False), (100.0, True)])
def test_goals(ratio: float, *, met: bool) -> None:
    """The goals are judged by fp32 at 64 MiB on one node of four ranks, and nowhere else."""
    found = collectives(ratio=ratio)
    assert set(command.goals(found)) == set(command.GOALS)
    assert set(command.goals(found).values()) == {met}
    elsewhere = [sample.model_copy(update={"numel": 1 << 20}) for sample in found.collectives]
    assert command.goals(found.model_copy(update={"collectives": elsewhere})) == {}
    quantised = [sample.model_copy(update={"codecs": ("int8:2048",)}) for sample in found.collectives]
    assert command.goals(found.model_copy(update={"collectives": quantised})) == {}


@given(st.integers(1, 4), st.integers(1, 4))
def test_shared_memory_carries_what_stays_inside_a_node(nodes: int, ranks: int) -> None:
    """Hops lie inside a node along the local axis of several ranks, and along the world of one node."""
    topology = Topology(nodes, ranks)
    local, node, world = topology.local_axis, topology.node_axis, topology.world_axis

    def inside(*axes: Axis) -> bool:
        return any_inside(topology, axes)

    assert inside(local) == inside(node, local) == (ranks > 1)
    assert inside(world) == (nodes == 1 and ranks > 1)
    assert not inside(node)
    assert not inside()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (1, 2)])
def test_no_row_claims_what_did_not_carry_it(folder: Path, nodes: int, ranks: int) -> None:
    """Rows of shared memory are those of hops inside a node: none among nodes of one rank."""
    arguments = ["--nodes", str(nodes), "--ranks", str(ranks), "--megabytes", "1", "--seconds", "0"]
    assert cli.main(["bench", "collectives", *arguments]) == cli.OK
    (found,) = bench_record.read_all(folder / "results" / "bench-collectives")
    shared = {(s.operation, s.algorithm) for s in found.collectives if s.transport == "shm"}
    alone = {(s.operation, s.algorithm) for s in found.collectives if s.transport == "backend"}
    assert shared == (set() if ranks == 1 else alone - {("reduce_scatter", "ring")})


@pytest.mark.timeout(120)
def test_collectives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks leave every algorithm and codec, with the ledger's bytes beside gloo's."""
    arguments = ["--nodes", "2", "--ranks", "1", "--megabytes", "1", "--seconds", "0"]
    assert cli.main(["bench", "collectives", *arguments]) == cli.OK
    (found,) = bench_record.read_all(folder / "results" / "bench-collectives")
    by = {(s.operation, s.algorithm, s.codecs, s.transport): s for s in found.collectives}
    flat = by["all_gather", "flat", ("fp32",), "backend"]
    assert flat.sent_inter == flat.reference_sent == 1 << 20
    assert by["reduce_scatter", "two_hop", ("fp32",), "backend"].reference_sent == 2 << 20
    assert by["reduce_scatter", "ring", ("int8:2048",), "backend"].sent_intra == 0
    assert "times gloo" in capsys.readouterr().out


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=5))
def test_records_come_back(seconds: list[float]) -> None:
    """A record reads back as it was written."""
    sample = codecs().codecs[0].model_copy(update={"seconds": seconds, "reference_seconds": seconds})
    made = codecs().model_copy(update={"codecs": [sample]})
    assert Bench.model_validate_json(made.model_dump_json()) == made


def test_records_refuse(tmp_path: Path) -> None:
    """Unpaired seconds, other schemas and suites' records are no records of a benchmark."""
    sample = codecs().codecs[0].model_dump()
    with pytest.raises(ValueError, match="2 rounds of seconds beside 1 of the reference"):
        CodecSample(**(sample | {"seconds": [1.0, 2.0], "reference_seconds": [1.0]}))
    with pytest.raises(ValueError, match="above 0"):
        CollectiveSample(**(collectives().collectives[0].model_dump() | {"seconds": [0.0, 1.0]}))
    with pytest.raises(RecordError, match="no records in it"):
        bench_record.read_all(tmp_path)
    path = bench_record.write(tmp_path, codecs())
    assert bench_record.holds(tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(data | {"schema_version": 99}), encoding="utf-8")
    with pytest.raises(RecordError, match="schema version 99"):
        bench_record.read_all(tmp_path)
    with pytest.raises((BenchError, RecordError)):
        bench_record.check_pool(tmp_path, "another")


@pytest.mark.skipif(deepspeed_peer.why_missing() is None, reason="DeepSpeed is installed")
def test_deepspeed_is_optional(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed that is asked for and missing is refused, with how to install it."""
    assert "pip install" in refused(folder, capsys, "bench", "engine", "--contender", "deepspeed")


@pytest.mark.timeout(120)
def test_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contenders train the same in the same processes, each in every round; other models have no goals."""
    arguments = ["--ranks", "2", "--model", "gpt-tiny", "--seconds", "0"]
    chosen = [word for name in ("fsdp2", "exact", "exact-backend") for word in ("--contender", name)]
    assert cli.main(["bench", "engine", *arguments, *chosen]) == cli.OK
    assert "goal" not in capsys.readouterr().out
    (found,) = bench_record.read_all(folder / "results" / "bench-engine")
    names = [(sample.contender, sample.transport) for sample in found.engine]
    assert names == [("alone", "none"), ("fsdp2", "backend"), ("exact", "shm"), ("exact", "backend")]
    for sample in found.engine:
        assert len(sample.seconds) == bench_engine.FEWEST_ROUNDS
        assert len(sample.losses) == bench_engine.STEPS * (bench_engine.FEWEST_ROUNDS + 1)
        assert sample.reference_seconds == found.engine[0].seconds
        assert sample.losses[-1] < sample.losses[0]
    assert found.engine[0].losses[0] == pytest.approx(found.engine[1].losses[0], rel=1e-6)


def test_together_of_the_engine() -> None:
    """A round lasts as long as the slowest rank's; a step's loss is the mean over ranks, CPU times add up."""
    one = engine().engine[1]
    fast = one.model_copy(update={"seconds": [1.0, 2.0], "losses": [3.0, 2.0], "cpu_seconds": [0.5, 1.0]})
    slow = one.model_copy(update={"seconds": [2.0, 1.0], "losses": [5.0, 1.0], "cpu_seconds": [2.0, 1.0]})
    (found,) = bench_engine.together([[fast], [slow]])
    assert (found.seconds, found.losses, found.cpu_seconds) == ([2.0, 2.0], [4.0, 1.5], [2.5, 2.0])


@given(st.floats(0.2, 5.0))
def test_goals_of_the_engine(ours: float) -> None:
    """A goal is met if and only if the median of the rounds' ratios to the fastest peer reaches it."""
    found = engine_goals.verdicts(engine(ours=ours).engine)
    assert [verdict.goal for verdict in found] == list(engine_goals.GOALS)
    for verdict in found:
        assert verdict.found.estimate == pytest.approx(ours)
        assert verdict.met == (verdict.found.estimate >= verdict.goal.ratio)
        assert ("MISSED" in engine_goals.told(verdict)) != verdict.met


def test_the_fastest_peer_counts() -> None:
    """A goal is judged beside its fastest peer of the same topology, and names it."""
    samples = engine(ours=2.0).engine
    faster = [
        sample.model_copy(update={"seconds": [0.8 * took for took in sample.seconds]})
        if (sample.contender, sample.nodes) == ("deepspeed-kept", 1)
        else sample
        for sample in samples
    ]
    best, ddp, alone, shaped = engine_goals.verdicts(faster)
    assert best.peer == alone.peer == "deepspeed-kept"
    assert best.found.estimate == pytest.approx(1.6)
    assert "DDP: 2" in engine_goals.told(ddp)
    assert shaped.found.estimate == pytest.approx(2.0)


def test_goals_are_of_one_model() -> None:
    """Another model, or a run without peers, is judged by no goal."""
    samples = engine().engine
    other = [sample.model_copy(update={"model": "gpt-medium"}) for sample in samples]
    assert engine_goals.verdicts(other) == []
    assert engine_goals.verdicts([sample for sample in samples if sample.contender == "exact"]) == []


@given(st.sampled_from([2e-3, -2e-3, float("nan")]), st.integers(0, 1))
def test_losses_must_be_equal(off: float, step: int) -> None:
    """A loss beyond the tolerance, or none, names contender, step and both numbers; less is rounding."""
    samples = engine().engine
    assert engine_goals.unequal(samples) is None
    for scale, told in ((1.0, True), (1e-2, math.isnan(off))):
        losses = list(samples[1].losses)
        losses[step] *= 1 + scale * off
        changed = [samples[0], samples[1].model_copy(update={"losses": losses}), *samples[2:]]
        words = engine_goals.unequal(changed)
        assert (words is not None) == told
        assert words is None or f"in step {step} on 1x4 ranks" in words


def test_compute_alone_begins_equal() -> None:
    """Who trains on its own batches alone is held to the first loss, and to no other."""
    first, *rest = engine().engine
    assert first.losses[1] != rest[0].losses[1]
    other = first.model_copy(update={"losses": [5.6, 5.0]})
    assert "alone over none has loss 5.6 in step 0" in str(engine_goals.unequal([other, *rest]))


OVERLAP = ("overlap", "--layers", "2", "--sequences", "1", "--megabytes", "1")


@pytest.mark.link
@pytest.mark.timeout(180)
def test_overlap(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run holds the link to the rate that follows from compute alone, and keeps raw seconds of every round;
    other sizes have no goals.
    """
    assert cli.main(["bench", *OVERLAP, "--seconds", "0"]) == cli.OK
    assert "goal" not in capsys.readouterr().out
    (found,) = bench_record.read_all(folder / "results" / "bench-overlap")
    assert [sample.policy for sample in found.overlap_steps] == list(bench_overlap.POLICIES)
    for step in found.overlap_steps:
        assert len(step.seconds) == len(step.forward_seconds) == bench_overlap.FEWEST_ROUNDS
        pairs = zip(step.forward_seconds, step.backward_seconds, step.reference_seconds, strict=True)
        assert all(max(forward, backward) < whole for forward, backward, whole in pairs)
    zero3, zeropp = found.overlap_steps
    # Gradients are as large as weights, and all weights but the last block's travel twice.
    assert zero3.sent_forward < zero3.sent_backward < 2 * zero3.sent_forward
    assert zeropp.sent_backward < zeropp.sent_forward < zero3.sent_forward
    (hops,) = found.overlap_hops
    assert (hops.numel, hops.first_sent) == (1 << 18, 2 * hops.second_sent)
    assert len(hops.first_seconds) == len(hops.seconds) == bench_overlap.FEWEST_ROUNDS
    # Tokens that the link has saved cannot carry more than a burst.
    frames = 8e-6 * 2 * (hops.second_sent - link.shape(hops.rate_mbit).burst)
    assert min(hops.second_seconds) > frames / hops.rate_mbit / 2


@pytest.mark.timeout(120)
def test_overlap_needs_namespaces(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no link can be shaped the run ends in one line: a pacer holds only what passes our wire."""

    def refuse(*_: object) -> None:
        raise link.LinkError("no network namespaces here")

    monkeypatch.setattr(link, "_open_namespaces", refuse)
    assert "no network namespaces here" in refused(folder, capsys, "bench", *OVERLAP)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(1e-3, 1e2), st.floats(1e-3, 1e2))
def test_computation_has_its_room(forward: int, backward: int, ahead: float, behind: float) -> None:
    """At the rate of a step computation takes 1.2 times as long as communication in the tighter of forward
    and backward, and no less in the other; a second hop takes three times as long as the first.
    """
    rate = overlap_goals.rate_for_step((forward, backward), (ahead, behind))
    rooms = ahead / (8e-6 * forward / rate), behind / (8e-6 * backward / rate)
    assert min(rooms) == pytest.approx(overlap_goals.ROOM, rel=0.01)
    rate = overlap_goals.rate_for_hops(forward, ahead)
    assert 8e-6 * forward / rate == pytest.approx(3 * ahead, rel=0.01)


@given(st.floats(0.9, 1.3), st.floats(-1.0, 2.0), st.floats(1.0, 1.5))
def test_goals_of_overlap(of_alone: float, hidden: float, room: float) -> None:
    """A step's goal is met if the median ratio to compute alone is small enough on a link that leaves
    computation no more room than was meant, and that of chunks if the median share is large enough.
    """
    made = overlap(of_alone=of_alone, hidden=hidden, room=room)
    *steps, chunks = overlap_goals.verdicts(made.overlap_steps, made.overlap_hops)
    assert len(steps) == 2
    for verdict in steps:
        tight = 1.025 * room <= overlap_goals.MOST_ROOM  # the median of the backward pass
        assert verdict.met == (verdict.found.estimate <= overlap_goals.MOST_OF_ALONE and tight)
    assert chunks.met == (chunks.found.estimate >= overlap_goals.LEAST_HIDDEN)
    assert chunks.found.estimate == pytest.approx(hidden, abs=1e-6)
    assert all(("MISSED" in overlap_goals.told(each)) != each.met for each in (*steps, chunks))


def test_goals_of_overlap_are_of_one_size() -> None:
    """Other models and gradients are judged by no goal."""
    made = overlap()
    steps = [step.model_copy(update={"layers": 4}) for step in made.overlap_steps]
    hops = [sample.model_copy(update={"numel": 1 << 20}) for sample in made.overlap_hops]
    assert overlap_goals.verdicts(steps, hops) == []


def test_records_of_overlap() -> None:
    """A round lasts as long as the slowest rank's; unequal numbers of rounds are no record."""
    (hops,) = overlap().overlap_hops
    other = hops.model_copy(update={"seconds": [1.0, 0.01], "first_seconds": [0.001, 9.0]})
    found = bench_overlap.together([hops, other])
    assert (found.seconds, found.first_seconds) == ([1.0, hops.seconds[1]], [0.02, 9.0])
    with pytest.raises(ValueError, match="1 values beside 2 rounds"):
        OverlapHops(**(hops.model_dump() | {"second_seconds": [1.0]}))
    with pytest.raises(ValueError, match="above 0"):
        OverlapStep(**(overlap().overlap_steps[0].model_dump() | {"forward_seconds": [0.0, 1.0]}))
