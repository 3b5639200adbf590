"""``zeropp bench`` times what it documents, keeps raw seconds, and refuses bad input in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cli, errors
from harness.bench import codecs as bench_codecs
from harness.bench import overlap
from harness.bench.rounds import interleaved
from harness.cluster import link, rank_processes
from harness.cluster.rank import Rank
from harness.records import bench_record
from harness.records.bench_record import Sample, merge_ranks
from harness.records.trial_record import RecordError
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.policy.topology import Topology
from tests.harness.test_cli import folder, refused
from tests.report.bench.bench_records import OPERATIONS, codecs, collectives
from tests.support.ranks import on_threads

__all__ = ["folder"]  # a fixture


# A process of its own, as the benchmark of codecs sees it.
ALONE = Rank(0, Topology(1, 1), None, None, lambda _: None, 1)  # type: ignore[arg-type]


BAD = {
    "no codec": (("codecs", "--codec", "int9:64"), "2 to 8 bits"),
    "no backend": (("codecs", "--backend", "gpu"), "unknown --backend 'gpu'"),
    "no type": (("codecs", "--kind", "fp64"), "unknown --kind 'fp64'"),
    "a codec for another library": (
        ("codecs", "--codec", "int4:256", "--backend", "torch.compile"),
        "--codec int4:256 does not apply to --backend torch.compile",
    ),
    "seconds without end": (("collectives", "--seconds", "inf"), "Invalid value for '--seconds'"),
    "no size": (("codecs", "--megabytes", "0"), "--megabytes"),
    "negative size": (("collectives", "--megabytes", "1", "--megabytes", "-4"), "--megabytes"),
    "a rate without unit": (("collectives", "--rate", "50"), "with the unit"),
    "one rank": (("collectives", "--nodes", "1", "--ranks", "1"), "expected 2 to 64 ranks"),
    "no such benchmark": (("codec",), "No such command"),
    "no benchmark": ((), "Missing command"),
    "a link of one node": (
        ("collectives", "--nodes", "1", "--rate", "1 Gbit/s"),
        "needs a link between nodes",
    ),
    "no GPU": pytest.param(
        ("codecs", "--backend", "cuda"),
        "--backend 'cuda' is not available here: torch finds no CUDA device",
        marks=pytest.mark.needs("no CUDA device"),
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """What cannot be measured is refused in one line with status 2, and nothing is written."""
    assert message in refused(folder, capsys, "bench", *arguments)


@pytest.mark.parametrize("name", ["file", "file/there", "dangling", "dangling/there", "loop"])
def test_results_that_are_no_folder(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A file or a link to nothing in place of the results folder is refused before anything is measured, not after."""
    (folder / "file").write_text("", encoding="utf-8")
    (folder / "dangling").symlink_to("nowhere/else")
    (folder / "loop").symlink_to("loop")
    error = refused(folder, capsys, "bench", "collectives", "--results", name)
    assert "is not a folder" in error


def test_other_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with records of another machine or other code is refused."""
    bench_record.write(folder / "results" / "bench-codecs", codecs())
    assert "another machine or version of the code" in refused(folder, capsys, "bench", "codecs")


def test_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run leaves one record of raw seconds in pairs, prints its table and draws the page."""
    arguments = ["bench", "codecs", "--codec", "int8:64", "--codec", "bf16", "--megabytes", "1"]
    assert cli.main([*arguments, "--seconds", "0.01"]) == cli.OK
    out, _ = capsys.readouterr()
    assert "int8:64" in out
    assert out.endswith("results/bench-codecs/report.html\n")
    assert (folder / "results" / "bench-codecs" / "report.html").exists()
    (record,) = bench_record.read_all(folder / "results" / "bench-codecs")
    operations = {s.names["operation"] for s in record.samples if s.names["codec"] == "int8:64"}
    assert operations == set(OPERATIONS)
    for sample in record.samples:
        assert len(sample.seconds) >= bench_codecs.FEWEST_ROUNDS
    assert cli.main(["show", "bench-codecs"]) == cli.OK
    assert "int8:64" in capsys.readouterr().out
    assert cli.main(["report", "bench-codecs"]) == cli.OK


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls each operation once in one round, for tests that read no seconds."""
    monkeypatch.setattr(bench_codecs, "FEWEST_ROUNDS", 1)
    monkeypatch.setattr(bench_codecs, "_ROUND_SECONDS", 0.0)


@pytest.mark.usefixtures("briefly")
def test_moved_bytes() -> None:
    """Bytes moved are those that each operation must read and write once."""
    samples = bench_codecs.measure(
        ALONE, codecs=["int4:256"], backends=["reference"], kinds=["fp32"], mebibytes=1, seconds=0.0
    )
    elements, frame = 4 << 18, parse("int4:256").frame_bytes(1 << 18)
    assert {sample.names["operation"]: sample.sizes["moved_bytes"] for sample in samples} == {
        "encode": elements + frame,
        "decode": elements + frame,
        "decode_sum": 4 * frame + elements,
        "decode_sum_encode": 5 * frame,
        "encode_carried": 3 * elements + frame,
    }


@pytest.mark.usefixtures("briefly")
def test_moved_bytes_of_a_codec_without_loss_are_those_that_it_uses() -> None:
    """A frame whose size depends on the values counts with what it uses of it: about 27 of 32 bits."""
    samples = bench_codecs.measure(
        ALONE, codecs=["lossless:zlib"], backends=["cpu"], kinds=["fp32"], mebibytes=1, seconds=0.0
    )
    elements = 4 << 18
    moved = {sample.names["operation"]: sample.sizes["moved_bytes"] for sample in samples}
    frame = moved["encode"] - elements
    assert 26.5 / 32 < frame / elements < 27.5 / 32
    assert moved["decode_sum"] == 4 * frame + elements


def test_a_codec_whose_package_is_missing_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without zstandard, its codec is refused in one line before anything is measured."""
    monkeypatch.setattr("impl.codecs.codec.has_zstd", lambda: False)
    error = refused(folder, capsys, "bench", "codecs", "--codec", "lossless:zstd")
    assert "needs the package zstandard, which is not installed: run pip install" in error


@given(st.integers(1, 4), st.integers(1, 6), st.floats(0.0, 1.0))
def test_candidates_take_turns(candidates: int, most: int, seconds: float) -> None:
    """Each candidate runs once a round in rotating order; the warm-up is left out, and the number of rounds keeps
    its limits.
    """
    calls: list[int] = []

    def contend(number: int) -> int:
        calls.append(number)
        return len(calls)

    def body(_: Mesh) -> list[list[int]]:
        runs = [partial(contend, number) for number in range(candidates)]
        return interleaved(ALONE, runs, "", (min(2, most), most), seconds=seconds)

    (results,) = on_threads(Topology(1, 1), body, backend="threaded")
    done = len(results[0])
    assert min(2, most) <= done <= most
    assert calls == [(i + turn) % candidates for i in range(done + 1) for turn in range(candidates)]
    for number, counts in enumerate(results):
        assert counts == [count for count, candidate in enumerate(calls, 1) if candidate == number][1:]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (1, 2)])
def test_collectives(folder: Path, capsys: pytest.CaptureFixture[str], nodes: int, ranks: int) -> None:
    """Two ranks measure all algorithms and codecs, with the bytes of gloo; shared memory is used only for hops
    inside a node.
    """
    arguments = ["--nodes", str(nodes), "--ranks", str(ranks), "--megabytes", "1", "--seconds", "0"]
    assert cli.main(["bench", "collectives", *arguments]) == cli.OK
    assert "times gloo" in capsys.readouterr().out
    (record,) = bench_record.read_all(folder / "results" / "bench-collectives")
    keys = ("operation", "algorithm", "codec", "transport")
    samples = {tuple(str(s.names[key]) for key in keys): s for s in record.samples}
    shared, backend = (
        {key[:2] for key in samples if key[3] == transport} for transport in ("shm", "backend")
    )
    assert shared == (set() if ranks == 1 else backend - {("reduce_scatter", "ring")})
    link, other = ("inter", "intra") if ranks == 1 else ("intra", "inter")
    flat = samples["all_gather", "flat", "fp32", "backend"]
    assert flat.sent[link] == flat.sizes["reference_sent"] == 1 << 20
    assert samples["reduce_scatter", "two_hop", "fp32", "backend"].sizes["reference_sent"] == 2 << 20
    assert samples["reduce_scatter", "ring", "int8:2048", "backend"].sent[other] == 0


def test_together() -> None:
    """Over all ranks, a round takes as long as on the slowest rank, and bytes add up."""
    sample = collectives().samples[0]
    fast, slow = (
        sample.model_copy(
            update={"seconds": took, "reference_seconds": took[::-1], "parts": {"first": took}, "sent": sent}
        )
        for took, sent in (([1.0, 2.0], {"inter": 0, "intra": 5}), ([3.0, 1.0], {"inter": 0, "intra": 6}))
    )
    (combined,) = merge_ranks([[fast], [slow]])
    assert combined.seconds == combined.parts["first"] == [3.0, 2.0]
    assert combined.reference_seconds == [2.0, 3.0]
    assert combined.sent == {"inter": 0, "intra": 11}


def test_records_refuse(tmp_path: Path) -> None:
    """Unpaired seconds, other schemas and records of suites are refused as records of a benchmark."""
    sample = collectives().samples[0].model_dump()
    with pytest.raises(ValueError, match="numbers of rounds: 2 in seconds, but 1 in reference_seconds"):
        Sample(**(sample | {"reference_seconds": [1.0]}))
    with pytest.raises(ValueError, match="numbers of rounds: 2 in seconds, but 1 in first"):
        Sample(**(sample | {"parts": {"first": [1.0]}}))
    for wrong in ({"seconds": [0.0, 1.0]}, {"parts": {"forward": [0.0, 1.0]}}):
        with pytest.raises(ValueError, match="above 0"):
            Sample(**(sample | wrong))
    with pytest.raises(RecordError, match="no records in it"):
        bench_record.read_all(tmp_path)
    path = bench_record.write(tmp_path, codecs())
    assert bench_record.holds(tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(data | {"started": "2020-01-01"}), encoding="utf-8")
    with pytest.raises(RecordError, match="edited or damaged since it was written"):
        bench_record.read_all(tmp_path)


def test_what_fails_is_not_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails gives one line with status 1 and no record; a refusal of a rank gives status 2."""
    (folder / "results").mkdir(exist_ok=True)
    crash = "rank 1 was killed by signal 9 (SIGKILL)"
    for error, status, message in (
        (rank_processes.LaunchError("crashed", crash, Path("bench.log")), 1, f"{crash}; log bench.log"),
        (rank_processes.LaunchError("refused", "no corpus here", None), cli.REFUSED, "no corpus here"),
    ):
        monkeypatch.setattr(rank_processes, "run_ranks", mock.Mock(side_effect=error))
        assert cli.main(["bench", "collectives", "--ranks", "2"]) == status
        stderr = capsys.readouterr().err
        assert stderr.count("\n") == 1
        assert message in stderr
    assert not list(folder.glob("results/bench-collectives/*.json"))


OVERLAP = ("overlap", "--layers", "2", "--sequences", "1", "--megabytes", "1")


@pytest.mark.needs("namespaces")
@pytest.mark.timeout(180)
@pytest.mark.long
def test_overlap(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The link has the rate that follows from compute alone, and the record keeps the seconds of every round."""
    assert cli.main(["bench", *OVERLAP, "--seconds", "0"]) == cli.OK
    assert "shorter hop hidden" in capsys.readouterr().out
    (record,) = bench_record.read_all(folder / "results" / "bench-overlap")
    *steps, hops = record.samples
    assert [sample.names["policy"] for sample in steps] == list(overlap.POLICIES)
    for step in steps:
        assert len(step.seconds) == overlap.ROUNDS[0]
        pairs = zip(step.parts["forward"], step.parts["backward"], step.reference_seconds, strict=True)
        assert all(max(forward, backward) < whole for forward, backward, whole in pairs)
    zero3, zeropp = (step.sizes for step in steps)
    # Gradients are as large as weights, and all weights but the last block's travel twice.
    assert zero3["sent_forward"] < zero3["sent_backward"] < 2 * zero3["sent_forward"]
    assert zeropp["sent_backward"] < zeropp["sent_forward"] < zero3["sent_forward"]
    assert hops.names["numel"] == 1 << 18
    assert hops.sizes["first_sent"] == 2 * hops.sizes["second_sent"]
    assert len(hops.seconds) == overlap.ROUNDS[0]
    rate = float(hops.names["rate_mbit"] or 0)
    # Tokens that the link has saved cannot carry more than a burst.
    frames = 8e-6 * 2 * (hops.sizes["second_sent"] - link.shape(rate).burst)
    assert min(hops.parts["second"]) > frames / rate / 2


@pytest.mark.timeout(120)
def test_overlap_needs_namespaces(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without network namespaces the command ends in one line, since a pacer would limit only messages of our wire."""
    refusal = mock.Mock(side_effect=errors.LinkError("no network namespaces here"))
    monkeypatch.setattr(link, "_open_namespaces", refusal)
    assert "no network namespaces here" in refused(folder, capsys, "bench", *OVERLAP)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(1e-3, 1e2), st.floats(1e-3, 1e2))
def test_computation_has_its_room(forward: int, backward: int, ahead: float, behind: float) -> None:
    """Computation takes 1.2 times as long as communication in the tighter of forward and backward."""
    rate = overlap.rate_for_step((forward, backward), (ahead, behind))
    rooms = ahead / (8e-6 * forward / rate), behind / (8e-6 * backward / rate)
    assert min(rooms) == pytest.approx(overlap.ROOM, rel=0.01)
