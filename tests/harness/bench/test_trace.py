"""A trace can be opened by Chrome and Perfetto, and its summary follows from its spans."""

from __future__ import annotations

import itertools
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cli
from harness.bench.trace import PROFILED, computing, has_lanes, refusal
from harness.records.trace_record import CODING, COMPUTE, LANES, overlap
from harness.suites.suite_file import load
from harness.suites.trial import Cluster, Trial
from harness.whatif import kineto
from impl.comm.ledger import ACROSS, BETWEEN, INSIDE, WAITING, WITHIN, Span, Timeline
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.policy.topology import Topology
from tests.golden import record
from tests.support.ranks import on_threads

SUITE = """name = "q"
question = "What happens in a step?"
[defaults]
model.name = "gpt-tiny"
sequence = 16
tokens_per_rank = 32
steps = 2
warmup = 1
policy.max_padding = 0.9
[defaults.cluster]
link = "paced"
rate = "100 Mbit/s"
[matrix]
strategy = ["zeropp", "zero3", "ddp"]
"""


def test_a_step_of_every_rank_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has a process for each rank and a thread for each lane, whose events do not overlap, and nothing
    else.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.toml").write_text(SUITE)
    trials = {trial.strategy: trial for trial in load(tmp_path / "q.toml").trials}
    assert cli.main(["trace", "q.toml", trials["zeropp"].id[:8]]) == cli.OK
    out = capsys.readouterr().out
    assert "messages between nodes were in flight" in out
    path = tmp_path / "results" / "q" / "traces" / f"trace-{trials['zeropp'].id}.json"
    picture = path.with_suffix(".svg")
    assert out.endswith(f"/traces/{path.name}\n{picture.relative_to(tmp_path)}\n")
    profiles = path.parent / trials["zeropp"].id
    assert sorted(path.parent.iterdir()) == [profiles, path, picture]
    _check_profiles(profiles)
    assert "<svg" in picture.read_text()
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(range(4))
    assert {event["cat"] for event in spans} == set(LANES)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lane = operator.itemgetter("pid", "tid")
    for key, group in itertools.groupby(sorted(spans, key=lambda e: (*lane(e), e["ts"])), key=lane):
        row = list(group)
        assert {event["cat"] for event in row} == {names[key]}
        for earlier, later in itertools.pairwise(row):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3
    sent = [event["args"]["bytes"] for event in spans if event["cat"] == BETWEEN]
    assert sent
    assert min(sent) > 0
    assert any("int4" in event["name"] for event in spans if event["cat"] == CODING)
    parts = {event["name"] for event in spans if event["cat"] == COMPUTE}
    assert parts == {"forward", "backward", "optimizer"}


def _check_profiles(folder: Path) -> None:
    """Check that torch.profiler's traces have all steps, and names of codecs, units and hops."""
    assert sorted(path.name for path in folder.iterdir()) == [f"rank-{rank}.json.gz" for rank in range(4)]
    trace = kineto.read(folder / "rank-1.json.gz")
    assert (trace.rank, trace.world, len(trace.steps)) == (1, 4, PROFILED)
    names = {event.name for event in trace.steps[-1].host if event.name.startswith("zeropp::")}
    assert any(re.fullmatch(r"zeropp::encode int8:2048", name) for name in names)
    for way in ("post", "wait"):
        assert any(re.fullmatch(rf"zeropp::{way} weights \S+ hop node \d+ B", name) for name in names)
        assert any(re.fullmatch(rf"zeropp::{way} gradients \S+ hop local \d+ B", name) for name in names)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_peers_are_traced_for_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """The traces of a peer are read by zeropp whatif, and their own step is replayed within 2 %."""
    monkeypatch.chdir(tmp_path)
    text = SUITE.replace('"zeropp", "zero3", "ddp"', f'"{strategy}"').replace('"paced"', '"none"')
    (tmp_path / "q.toml").write_text(
        text.replace('rate = "100 Mbit/s"\n', "").replace("policy.max_padding = 0.9\n", "")
    )
    (trial,) = load(tmp_path / "q.toml").trials
    assert cli.main(["trace", "q.toml", trial.id]) == cli.OK
    paths = sorted(str(path) for path in (tmp_path / "results/q/traces" / trial.id).iterdir())
    assert capsys.readouterr().out.endswith(f"/traces/{trial.id}\n")
    assert cli.main(["whatif", *paths, "--traced-ranks-per-node", "2", "--policy", "zeropp"]) == cli.OK
    assert f"{PROFILED} steps of 2x2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ("zz", "no trials have an id that begins with 'zz'; name one of its trials"),
        ("", "3 trials have an id that begins with ''"),
    ],
)
def test_an_unknown_trial_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], identity: str, message: str
) -> None:
    """An unknown trial is refused in one line that names the trials of the suite."""
    (tmp_path / "q.toml").write_text(SUITE)
    assert cli.main(["trace", str(tmp_path / "q.toml"), identity]) == cli.REFUSED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cluster": Cluster(device="cuda", transport="nccl")}, "device 'cuda'"),
        ({"cluster": Cluster(nodes=1, ranks_per_node=1)}, "1x1 ranks"),
        ({"workload": "generate"}, "workload 'generate'"),
    ],
)
def test_what_has_no_trace_is_refused(fields: dict[str, Any], message: str) -> None:
    """Trials on GPUs, on one rank and of generation are refused with the reason; peers have profiles but no lanes."""
    assert message in (refusal(Trial(**fields)) or "")
    assert refusal(Trial()) is None
    for peer in ("ddp", "fsdp2+qgz"):
        assert refusal(Trial(strategy=peer)) is None
        assert not has_lanes(Trial(strategy=peer))


_TIMES = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(waits=st.lists(_TIMES), coding=st.lists(_TIMES), parts=st.lists(_TIMES, max_size=3))
def test_computing_is_what_is_left(
    waits: list[tuple[int, int]], coding: list[tuple[int, int]], parts: list[tuple[int, int]]
) -> None:
    """A moment counts as computing exactly if it is inside a part of the step, and neither in a wait nor in coding."""
    spans = [
        Span(lane, "x", begin, end)
        for lane, times in ((WAITING, waits), (CODING, coding), ("part of the step", parts))
        for begin, end in times
    ]
    computed = [set(range(int(span.begin), int(span.end))) for span in computing(spans)]
    busy = {second for begin, end in (*waits, *coding) for second in range(begin, end)}
    wanted = {second for begin, end in parts for second in range(begin, end)} - busy
    assert set().union(*computed) == wanted


@given(waits=st.lists(_TIMES), messages=st.lists(_TIMES))
def test_hidden_is_what_was_under_way_without_waiting(
    waits: list[tuple[int, int]], messages: list[tuple[int, int]]
) -> None:
    """A moment counts as hidden if a message between nodes is in flight and nothing waits for one."""
    spans = [Span(WAITING, ACROSS, *span) for span in waits] + [Span(BETWEEN, "", *span) for span in messages]
    under_way = {second for begin, end in messages for second in range(begin, end)}
    waited = {second for begin, end in waits for second in range(begin, end)}
    spans += [Span(INSIDE, "", 0, 100), Span(WAITING, WITHIN, 0, 100)]
    assert overlap(spans) == (len(under_way), len(under_way - waited))


def _run(mesh: Mesh, name: str) -> Any:
    return record.run(mesh, "backend", record.policies()[name], ragged=False, steps=1)


@pytest.mark.parametrize("name", ["zeropp", "ring", "two_hop in 4 chunks"])
def test_noting_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and ledgers equal those without tracing, and the messages between nodes in the trace are those of the
    ledger.
    """
    topology = Topology(2, 2)
    wanted = on_threads(topology, _run, name)
    timelines: dict[int, Timeline] = {}

    class Noting(Wire):
        def __init__(self, mesh: Mesh, **options: Any) -> None:
            super().__init__(mesh, **options)
            timelines[mesh.rank] = Timeline()
            self._noting = self.traced(timelines[mesh.rank])
            self._noting.__enter__()

    monkeypatch.setattr(record, "Wire", Noting)
    assert on_threads(topology, _run, name) == wanted
    for rank, run in enumerate(wanted):
        spans = timelines[rank].spans
        assert {span.lane for span in spans} <= {BETWEEN, INSIDE, WAITING}
        assert all(span.begin <= span.end for span in spans)
        between = sum(messages for *key, _, messages in run["ledger"] if key[-1] == "inter")
        assert bool(between) == any(span.lane == BETWEEN for span in spans)
        assert sum(span.lane == BETWEEN for span in spans) <= between
