"""Traces of one run are joined, clocks are aligned, and the replay of a step takes as long as the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import Refusal
from harness.whatif import joint, kineto
from harness.whatif.joint import Traced
from tests.harness.whatif.written import BUCKETS, REAL, Writer, ddp, ddp_seconds, fsdp, fsdp_seconds, on_gpu


def joined(folder: Path, *writers: Writer, rate: float | None = 1e8, ranks_per_node: int = 1) -> Traced:
    """Join the traces of all writers; the rate is in bytes a second."""
    return joint.join(map(kineto.read, [writer.write(folder) for writer in writers]), ranks_per_node, rate)


def replayed(traced: Traced) -> list[float]:
    """Return the milliseconds of each step's replay as traced."""
    return [1e3 * joint.replay(step, joint.as_traced(step)).seconds for step in traced.steps]


def test_ddp_is_replayed(tmp_path: Path) -> None:
    """A step in which one rank waits for the other takes the time that both ranks' operations need."""
    traced = joined(tmp_path, ddp(Writer(0)), ddp(Writer(1), late=4.0))
    assert [step.seconds * 1e3 for step in traced.steps] == pytest.approx([ddp_seconds()] * 2)
    assert replayed(traced) == pytest.approx([ddp_seconds()] * 2)
    assert traced.rules == {"backward": 8}


def test_fsdp_is_replayed(tmp_path: Path) -> None:
    """Collectives for which the host waits at once delay it."""
    traced = joined(tmp_path, fsdp(Writer(0)), fsdp(Writer(1)))
    assert replayed(traced) == pytest.approx([fsdp_seconds()] * 2)
    assert traced.rules == {"blocking": 24}


def test_the_rate_is_found(tmp_path: Path) -> None:
    """Without a rate, that of the largest collectives is taken, in bytes a second."""
    traced = joined(tmp_path, fsdp(Writer(0)), fsdp(Writer(1)), rate=None)
    assert traced.rate == pytest.approx(1e8)


@pytest.mark.parametrize(("compute", "sent"), [(20.0, 30.0), (20.0, 4.0)])
def test_streams_are_replayed(tmp_path: Path, compute: float, sent: float) -> None:
    """On a GPU the collective overlaps the second half of the computation, and the optimizer waits for it."""
    traced = joined(tmp_path, *(on_gpu(Writer(r), compute=compute, sent=sent) for r in (0, 1)))
    assert len(traced.steps) == 2  # the first is left out
    assert replayed(traced) == pytest.approx([step.seconds * 1e3 for step in traced.steps])
    assert traced.steps[0].seconds * 1e3 == pytest.approx(max(compute, compute / 2 + sent) + 3, rel=1e-3)


def test_a_real_trace_is_replayed() -> None:
    """The steps of a real trace of one of two A100s are replayed within 2 %."""
    traced = joint.join([kineto.read(REAL)], 1, None)
    assert traced.alone
    assert replayed(traced) == pytest.approx([step.seconds * 1e3 for step in traced.steps], rel=0.02)


@pytest.mark.parametrize("clock", [1000.0, -77.0])
def test_clocks_of_hosts_are_aligned(tmp_path: Path, clock: float) -> None:
    """A host whose clock is ahead changes no duration; the difference of the clocks is found."""
    plain = joined(tmp_path, ddp(Writer(0)), ddp(Writer(1), late=4.0))
    skewed = joined(tmp_path, ddp(Writer(0)), ddp(Writer(1, host="b", clock=clock), late=4.0))
    assert skewed.offsets[1] == pytest.approx(clock / 1e3)
    assert [step.seconds for step in skewed.steps] == pytest.approx([step.seconds for step in plain.steps])
    assert replayed(skewed) == pytest.approx(replayed(plain))


@pytest.mark.parametrize(
    ("writers", "says"),
    [
        ([ddp(Writer(0)), ddp(Writer(1), first=4)], "has steps 4 to 5, and .* has steps 3 to 4"),
        ([ddp(Writer(0)), ddp(Writer(1), steps=3)], "has steps 3 to 5"),
        (
            [ddp(Writer(0, world=3)), ddp(Writer(1, world=3))],
            "its run had a world size of 3, but none of the 2 traces is of rank 2: give",
        ),
        ([ddp(Writer(0)), fsdp(Writer(1))], "ranks 0 and 1 issued different collectives"),
        (
            [ddp(Writer(0)), ddp(Writer(1, world=4))],
            "its run had a world size of 4, but the run of .* had a world size of 2: give",
        ),
        ([ddp(Writer(0, world=1))], "its run had one rank"),
        ([ddp(Writer(0, groups=[[0, 1], [0], [0, 1, 2, 3]]))], "has 2 process groups"),
    ],
)  # fmt: skip
def test_traces_that_do_not_belong_together_are_refused(
    tmp_path: Path, writers: list[Writer], says: str
) -> None:
    """Ranks of different steps or runs, missing ranks and unnamed groups are refused in one line."""
    with pytest.raises(Refusal, match=says) as caught:
        joined(tmp_path, *writers)
    assert "\n" not in str(caught.value)


def test_a_rank_twice_is_refused(tmp_path: Path) -> None:
    """Two traces of one rank are refused."""
    path = ddp(Writer(0)).write(tmp_path)
    with pytest.raises(Refusal, match="more than one of the 2 traces is of rank 0"):
        joint.join([kineto.read(path), kineto.read(path)], 1, None)


def _changed(writer: Writer, prefix: str, **changes: Any) -> Writer:
    for event in writer.events:
        if event["name"].startswith(prefix):
            event.update(changes)
    return writer


@pytest.mark.parametrize(
    ("writer", "says"),
    [
        (_changed(on_gpu(Writer(0)), "nccl", args={"stream": 20}), "have no collective metadata"),
        (_changed(ddp(Writer(0)), "c10d::", args={}), "has no shapes: trace with profile"),
        (_changed(ddp(Writer(0)), "c10d::", name="c10d::send"), "messages between two ranks"),
        (
            _changed(ddp(Writer(0)), "gloo:", name="x"),
            "the number of issued collectives is 2, but gloo ran 0",
        ),
        (_changed(ddp(Writer(0)), "c10d::", name="c10d::scatter_"), "has c10d::scatter_, but only"),
    ],
)
def test_what_a_trace_lacks_is_named(tmp_path: Path, writer: Writer, says: str) -> None:
    """Without the collectives' names or sizes nothing can be predicted, and the message says how to trace them."""
    if "no shapes" in says:
        _changed(writer, "gloo:", args={})
    if "NCCL" in says or "metadata" in says:
        for event in writer.events:
            if event["name"].startswith("nccl"):
                event["args"] = {"stream": 20, "correlation": writer.events.index(event) - 1}
    with pytest.raises(Refusal, match=says):
        joined(tmp_path, writer)


def test_a_scalar_is_one_element(tmp_path: Path) -> None:
    """A tensor without dimensions, as in DeepSpeed's check for overflows, has an empty shape in a trace."""
    writer = ddp(Writer(0))
    for event in writer.events:
        if event["name"] == "c10d::allreduce_" and event["args"]["Input Dims"] == [[[BUCKETS[1]]]]:
            event["args"]["Input Dims"] = [[[]]]
        if event["name"] == "gloo:all_reduce" and event["args"]["Input Dims"] == [[BUCKETS[1]]]:
            event["args"]["Input Dims"] = [[]]
    traced = joined(tmp_path, writer)
    assert [one.seen.elements for one in traced.steps[0].collectives] == [BUCKETS[0], 1]


def test_a_run_without_collectives_is_refused(tmp_path: Path) -> None:
    """A program that sends nothing is refused."""
    writer = Writer(0)
    writer.step(1, 1, 2)
    writer.step(2, 2, 3)
    with pytest.raises(Refusal, match="has no collectives"):
        joined(tmp_path, writer)


def test_idle_streams_without_reason_are_refused(tmp_path: Path) -> None:
    """A stream that is idle for much of a step, and waits for nothing that is traced, cannot be predicted."""
    writer, begin = Writer(0), 100.0
    for number in range(3):
        writer.step(number, begin, begin + 100)
        writer.kernel("gemm", begin, begin + 1, begin + 20, 7)
        writer.nccl("allreduce", 1000, begin + 1, begin + 20, begin + 25)
        writer.kernel("gemm", begin + 2, begin + 60, begin + 100, 7)
        begin += 100
    with pytest.raises(Refusal, match=r"idle for 4[01]% of the step"):
        joined(tmp_path, writer)


def test_a_collective_for_which_no_kernel_waits_has_no_rule(tmp_path: Path) -> None:
    """On a GPU, no kernel may follow the last collective of a step; the optimizer then did not wait for it."""
    writer, begin = Writer(0), 100.0
    for number in range(3):  # the first step is left out
        writer.step(number, begin, begin + 100)
        writer.kernel("gemm", begin, begin + 1, begin + 95, 7)
        writer.nccl("allreduce", 1000, begin + 1, begin + 50, begin + 98)
        begin += 100
    assert joined(tmp_path, writer).rules == {"none": 2}


def test_waits_inside_the_copy_are_found(tmp_path: Path) -> None:
    """FSDP2 with asynchronous gathers waits inside the annotation of its copy, which begins before the gather ends."""
    writers = [Writer(0), Writer(1)]
    for writer in writers:
        for number in (3, 4):
            begin = 100.0 * number
            writer.step(number, begin, begin + 50)
            writer.add("FSDP::all_gather (a)", begin, begin + 1, "user_annotation")
            writer.gloo("_allgather_base_", 1_000_000, begin + 0.5, begin + 0.5, begin + 20.5)
            writer.add("aten::mm", begin + 1, begin + 5)
            writer.add("FSDP::all_gather_copy_out (a)", begin + 5, begin + 22, "user_annotation")
            writer.add("aten::mm", begin + 20.5, begin + 50)
    traced = joined(tmp_path, *writers)
    assert traced.rules == {"copy-out": 4}
    assert replayed(traced) == pytest.approx([50, 50])
    runs = [joint.Run(0.0, {}, between=True)]
    assert 1e3 * joint.replay(traced.steps[0], runs).seconds == pytest.approx(50 - 15.5)


def test_hosts_without_a_common_collective_are_aligned_through_others(tmp_path: Path) -> None:
    """With groups of two ranks in a chain, the clock of the last host is found through the hosts between."""
    writers = []
    for rank, clock in enumerate((0.0, 50.0, -30.0)):
        writer = Writer(rank, world=3, host=str(rank), clock=clock)
        for number in range(3, 6):
            begin = 100.0 * number
            writer.step(number, begin, begin + 50)
            for place, pair in enumerate(([0, 1], [1, 2])):
                if rank in pair:
                    at = begin + 10 * place
                    ranks = {"Group size": 2, "Process Group Ranks": str(pair)}
                    writer.nccl("allreduce", 1_000_000, at, at + 1, at + 9, **ranks)
            writer.kernel("gemm", begin + 20, begin + 20, begin + 50, 7)
        writers.append(writer)
    traced = joined(tmp_path, *writers, rate=None)
    assert [1e3 * traced.offsets[rank] for rank in range(3)] == pytest.approx([0, 50, -30])
