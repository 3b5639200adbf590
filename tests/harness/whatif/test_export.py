"""A predicted schedule is written as traces in torch.profiler's format, which predict the same step when read again."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.errors import Refusal
from harness.whatif import export, joint, kineto
from harness.whatif.joint import Traced
from harness.whatif.policies import REWRITES, Target, of_our_engine, rewritten
from harness.whatif.predict import CLOSE, Prediction, check_replay, predict
from impl.plan.step_time import CodecCost, Machine
from impl.policy.presets import PRESETS
from impl.policy.topology import Topology
from tests.harness.whatif.test_joint import joined
from tests.harness.whatif.test_predict import _hybrid
from tests.harness.whatif.written import RATE, REAL, Writer, ddp, fsdp, on_gpu

TWO, EXACT = Topology(2, 1), 1e-6
TRACED = 1e3 * RATE  # bytes a second
MACHINE = Machine(
    name="m", source="", fixed=1, per_token=0, efficiency=1, fewest=0, most=9, host="here", latency=1e-4,
    codecs={"bf16": CodecCost(encode=1e-9, decode=2e-9), "int8:2048": CodecCost(encode=2e-9, decode=3e-9)},
)  # fmt: skip


def of(folder: Path, kind: str) -> Traced:
    """Return two ranks' traces of one kind of program, of which one rank is late."""
    if kind == "gpu":
        return joined(folder, on_gpu(Writer(0)), on_gpu(Writer(1)), rate=2 * TRACED)
    if kind == "fsdp":
        return joined(folder, fsdp(Writer(0)), fsdp(Writer(1)), rate=TRACED)
    return joined(folder, ddp(Writer(0)), ddp(Writer(1), late=4.0), rate=TRACED)


def written(folder: Path, traced: Traced, target: Target) -> tuple[Prediction, list[Path]]:
    """Predict, and write the prediction."""
    prediction = predict(traced, target)
    (folder / "out").mkdir()
    files = export.paths(str(folder / "out" / "rank{rank}.json"), traced, target)
    export.write(files, traced, prediction)
    return prediction, [*files.values()]


def again(paths: list[Path], target: Target) -> Traced:
    """Read written files as traces of a run at the target's rate and topology."""
    return joint.join(map(kineto.read, paths), target.topology.ranks_per_node, target.rate)


def same_step(traced: Traced, target: Target, prediction: Prediction) -> None:
    """Assert that the written steps take as long as the prediction, and are replayed like any trace."""
    assert max(map(abs, check_replay(traced))) < CLOSE
    unchanged = replace(target, policy="same", machine=None, slower=1.0)
    assert predict(traced, unchanged).seconds == pytest.approx(prediction.seconds, rel=EXACT)
    assert len(traced.steps) == 2


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *itertools.product(("ddp", "fsdp", "gpu"), ("same", "bf16")),
        *itertools.product(("ddp", "fsdp"), ("zero3", "zero3-flat", "zeropp")),
        ("fsdp", "kept"),
    ],
)
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_written_step_takes_as_long_as_the_prediction(
    tmp_path: Path, kind: str, factor: float, policy: str
) -> None:
    """Read again, each policy's schedule takes the seconds that were predicted for it, at its rate."""
    traced = of(tmp_path, kind)
    target = Target(policy, factor * traced.rate, TWO, MACHINE)
    prediction, paths = written(tmp_path, traced, target)
    same_step(again(paths, target), target, prediction)


@pytest.mark.parametrize("policy", ["same", "zeropp", "zero3-flat"])
@pytest.mark.parametrize("topology", [Topology(4, 1), Topology(2, 2), Topology(4, 2)])
def test_all_ranks_of_another_topology_are_written(tmp_path: Path, topology: Topology, policy: str) -> None:
    """More ranks than were traced have a file each, and together they take the predicted seconds."""
    target = Target(policy, TRACED, topology)
    prediction, paths = written(tmp_path, of(tmp_path, "fsdp"), target)
    assert len(paths) == topology.world
    same_step(again(paths, target), target, prediction)


def test_collectives_inside_nodes_and_between_them(tmp_path: Path) -> None:
    """With HSDP both kinds of link have a track, and the step takes as long as predicted."""
    traced = joined(tmp_path, *map(_hybrid, range(4)), rate=None, ranks_per_node=2)
    target = Target("same", traced.rate / 2, traced.topology)
    prediction, paths = written(tmp_path, traced, target)
    same_step(again(paths, target), target, prediction)
    names = {event["args"]["name"] for event in events(paths[0]) if event["name"] == "thread_name"}
    assert names == {"host", "stream 7", "link between nodes", "links inside nodes"}


def test_a_real_trace_of_one_rank(tmp_path: Path) -> None:
    """The prediction from one rank's trace is one file, and its replay is within the tolerance of all replays."""
    traced = joint.join([kineto.read(REAL)], 1, None)
    for factor in (0.5, 2.0):
        target = Target("bf16", traced.rate * factor, TWO)
        (folder := tmp_path / str(factor)).mkdir()
        prediction, paths = written(folder, traced, target)
        found = again(paths, target)
        assert predict(found, replace(target, policy="same")).seconds == pytest.approx(
            prediction.seconds, rel=CLOSE
        )
        assert max(map(abs, check_replay(found))) < CLOSE


@pytest.mark.parametrize("policy", ["same", "bf16"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "gpu"])
def test_collectives_are_those_of_the_prediction(tmp_path: Path, kind: str, policy: str) -> None:
    """Kind, elements, type, group, bytes on the wire and phase of each collective stay, in the order of issue."""
    traced = of(tmp_path, kind)
    target = Target(policy, traced.rate, TWO)
    _, paths = written(tmp_path, traced, target)
    for before, after in zip(traced.steps, again(paths, target).steps, strict=True):
        expected = [run.sent for run in rewritten(before, traced, target, "scale")]
        assert [facts(one.seen) for one in after.collectives] == [facts(sent) for sent in expected]


def facts(collective: Any) -> tuple[Any, ...]:
    """Return what a file says of a collective."""
    return *collective.signature, collective.dtype, collective.wire_bytes(), collective.phase


def test_hops_of_our_engine_are_collectives(tmp_path: Path) -> None:
    """Each hop of ZeRO++ is a collective of its bytes, of its group, in the simulated order."""
    traced = of(tmp_path, "fsdp")
    target = Target("zeropp", TRACED, Topology(2, 2), MACHINE)
    _, paths = written(tmp_path, traced, target)
    messages = of_our_engine(traced.steps[0], traced, target, "scale").passes[0].messages
    for rank, path in enumerate(paths):
        sent = [event["args"] for event in events(path) if "nccl" in event["name"]]
        first = sent[: len(messages)]
        for message, found in zip(messages, first, strict=True):
            hop = message.hop.hop
            assert hop is not None
            assert found["Process Group Ranks"] == str([*hop.axis.group(rank)])
            whole = message.hop.nbytes * hop.axis.size
            assert (found["dtype"], found["Out msg nelems"], found["codec"]) == (
                "Byte",
                whole,
                str(hop.codec),
            )
        between = {args["Process Group Name"]: args["Process Group Ranks"] for args in sent}
        assert len(between) == 2


def test_sequence_numbers_count_the_collectives_of_a_group(tmp_path: Path) -> None:
    """They begin at one, and go on from step to step."""
    traced = joined(tmp_path, *map(_hybrid, range(4)), rate=None, ranks_per_node=2)
    _, paths = written(tmp_path, traced, Target("same", traced.rate, traced.topology))
    for path in paths:
        numbers = defaultdict[str, list[int]](list)
        for event in events(path):
            if "nccl" in event["name"]:
                numbers[event["args"]["Process Group Name"]].append(event["args"]["Seq"])
        assert len(numbers) == 2
        assert all(found == [1, 2, 3] for found in numbers.values())


def test_collectives_have_the_arguments_of_real_traces(tmp_path: Path) -> None:
    """A collective has all arguments that torch.profiler gives to NCCL's kernels and readers use."""
    real = next(event for event in events(REAL) if "Collective name" in event["args"])
    traced = of(tmp_path, "gpu")
    _, paths = written(tmp_path, traced, Target("same", traced.rate, TWO))
    ours = next(event for event in events(paths[0]) if "Collective name" in event["args"])
    assert real.keys() <= ours.keys()
    assert real["args"].keys() - ours["args"].keys() <= {
        "External id", "queued", "context", "registers per thread", "shared memory", "blocks per SM",
        "warps per SM", "grid", "block", "est. achieved occupancy %",
    }  # fmt: skip
    about = json.loads(paths[0].read_text())["zeropp_whatif"]
    assert (about["policy"], about["nodes"]) == ("same", 2)


@pytest.mark.parametrize("module", ["nccl_mlp", "allreduce_mlp", 'a"\\\n'])
@pytest.mark.parametrize("policy", ["same", "zeropp"])
def test_modules_may_have_any_name(tmp_path: Path, policy: str, module: str) -> None:
    """Modules that are called as NCCL's kernels are, or whose names need escapes, make no kernel another one."""
    writers = [fsdp(Writer(rank)) for rank in (0, 1)]
    for event in itertools.chain.from_iterable(writer.events for writer in writers):
        event["name"] = event["name"].replace("(a)", f"({module})")
    traced, target = joined(tmp_path, *writers, rate=TRACED), Target(policy, TRACED, TWO, MACHINE)
    (plain := tmp_path / "plain").mkdir()
    usual, named = written(plain, of(plain, "fsdp"), target)[1], written(tmp_path, traced, target)[1]
    pairs = zip(again(usual, target).steps, again(named, target).steps, strict=True)
    for before, after in pairs:
        assert [facts(one.seen) for one in after.collectives] == [
            facts(one.seen) for one in before.collectives
        ]
        assert [one.seen.as_all_reduce for one in after.collectives] == [
            one.seen.as_all_reduce for one in before.collectives
        ]


@pytest.mark.parametrize("ranks", [30, 31, 1 << 16])
def test_collectives_of_large_groups_list_few_ranks(tmp_path: Path, ranks: int) -> None:
    """As torch does, a collective of more than 30 ranks lists the first 29 and the last; readers know them all."""
    traced = joint.join([kineto.read(REAL)], 1, None)
    target = Target("bf16", traced.rate, Topology(ranks // 2, 2) if ranks % 2 == 0 else Topology(ranks, 1))
    _, (path,) = written(tmp_path, traced, target)
    first = next(event["args"] for event in events(path) if "Collective name" in event["args"])
    whole = [*range(ranks)]
    some = f"{str(whole[:29])[:-1]}, ..., {whole[-1]}]"
    assert first["Process Group Ranks"] == (str(whole) if ranks == 30 else some)
    assert again([path], target).steps[0].collectives[0].seen.group == tuple(whole)


@pytest.mark.parametrize("policy", ["bf16", "zeropp"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_shares_a_track_does_not_overlap(tmp_path: Path, kind: str, policy: str) -> None:
    """On each stream one kernel follows the other, and events of the host contain one another or do not overlap.

    Perfetto and chrome://tracing draw only such tracks right.
    """
    _, paths = written(tmp_path, of(tmp_path, kind), Target(policy, TRACED / 4, TWO, MACHINE))
    for path in paths:
        tracks = defaultdict[int, list[tuple[float, float]]](list)
        for event in events(path):
            if event["ph"] == "X":
                tracks[event["tid"]].append((event["ts"], -event["dur"]))
                assert event["dur"] >= 0
        for number, spans in tracks.items():
            open_until = list[float]()
            for begin, minus in sorted(spans):
                while open_until and open_until[-1] <= begin + 1e-3:
                    open_until.pop()
                assert all(begin - minus <= end + 2e-3 for end in open_until)
                assert number == 1 or not open_until
                open_until.append(begin - minus)


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file."""
    content = path.read_bytes()
    whole = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    found: list[dict[str, Any]] = whole["traceEvents"]
    return found


def test_the_command_writes_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--export`` writes one file a rank, says how to read them, and reads them; ``.gz`` is compressed."""
    traces = [str(ddp(Writer(rank)).write(tmp_path)) for rank in (0, 1)]
    pattern = str(tmp_path / "p{rank}.json.gz")
    options = ["--policy", "bf16", "--rate", "400 Mbit/s", "--json"]
    assert cli.main(["whatif", *traces, *options, "--export", pattern]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    assert found["exported"] == [str(tmp_path / f"p{rank}.json.gz") for rank in (0, 1)]
    command = ["whatif", *found["exported"], "--traced-rate", "400 Mbit/s", "--json"]
    assert cli.main(command) == cli.OK
    (row,) = json.loads(capsys.readouterr().out)["predictions"]
    assert row["seconds"] == pytest.approx(found["predictions"][0]["seconds"], rel=EXACT)
    assert cli.main(["whatif", *traces, "--export", str(tmp_path / "q{rank}.json")]) == cli.OK
    assert "--traced-ranks-per-node 1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("none/p{rank}.json", [], "none/p{rank}.json: there is no folder"),
        ("p{rank}.json", ["--policy", "same", "--policy", "bf16"], "the policies and rates give 2: give one"),
        (
            "p{rank}.json",
            ["--rate", "1 Gbit/s", "--rate", "2 Gbit/s"],
            "the policies and rates give 2: give one",
        ),
        ("p.json", [], "the prediction has 2 ranks, and a trace holds one: write {rank} into the name"),
        ("old{rank}.json", [], "old1.json: exists already: remove it, or choose another file"),
        ("p{rank}.json", ["--nodes", "2000"], "has 2000 ranks, and at most 1024 are written"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], says: str
) -> None:
    """One line with status 2 names the option and the way out, and no file is written or changed."""
    traces = [str(ddp(Writer(rank)).write(tmp_path)) for rank in (0, 1)]
    (tmp_path / "old1.json").write_text("mine")
    before = sorted(tmp_path.iterdir())
    assert cli.main(["whatif", *traces, *options, "--export", str(tmp_path / name)]) == cli.REFUSED
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old1.json").read_text() == "mine"


def test_a_file_that_cannot_be_written_leaves_none(tmp_path: Path) -> None:
    """If the last rank's file appears while the files are written, no file is written."""
    traced = of(tmp_path, "ddp")
    target = Target("same", TRACED, TWO)
    prediction, files = predict(traced, target), export.paths(str(tmp_path / "p{rank}"), traced, target)
    files[1].write_text("theirs")
    with pytest.raises(FileExistsError):
        export.write(files, traced, prediction)
    assert not files[0].exists()
    assert files[1].read_text() == "theirs"


def test_an_export_that_dies_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full at the last rank's file, there is no file of any rank, and nothing else is left."""
    traced = of(tmp_path, "ddp")
    target = Target("same", TRACED, TWO)
    prediction, files = predict(traced, target), export.paths(str(tmp_path / "p{rank}"), traced, target)
    before, write_bytes = sorted(tmp_path.iterdir()), Path.write_bytes

    def write_half(path: Path, content: bytes) -> int:
        if path.name == "p0":
            return write_bytes(path, content)
        write_bytes(path, content[: len(content) // 2])
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space left"):
        export.write(files, traced, prediction)
    assert sorted(tmp_path.iterdir()) == before


def test_weights_that_are_kept_let_no_rank_wait(tmp_path: Path) -> None:
    """A gather that is left out is no barrier: two ranks that are late in turn, before and after it, do not add up."""
    traced = of(tmp_path, "fsdp")
    step = traced.steps[0]
    runs = rewritten(step, traced, Target("kept", TRACED, TWO), "scale")
    before = joint.replay(step, runs).seconds
    for rank, name in ((1, "forward b"), (0, "backward b")):
        (late,) = (task for task in step.ranks[rank].tasks if task.name == name and task.seconds > 1e-3)
        late.seconds += 0.005
    assert joint.replay(step, runs).seconds == pytest.approx(before + 0.005)
    assert joint.replay(step, joint.as_traced(step)).seconds == pytest.approx(step.seconds + 0.010)


def test_policies_are_all_written(tmp_path: Path) -> None:
    """Every policy that can be predicted for FSDP2 on four ranks can be written and read again."""
    traced = of(tmp_path, "fsdp")
    for policy in [*REWRITES, *PRESETS]:
        target = Target(policy, TRACED, Topology(2, 2))
        (folder := tmp_path / policy).mkdir()
        try:
            prediction, paths = written(folder, traced, target)
        except Refusal:
            continue
        same_step(again(paths, target), target, prediction)
