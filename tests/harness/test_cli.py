"""The command line runs its commands, or refuses in one line with exit status 2."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from harness import cli, terminal
from harness.measure import machine, machine_file
from harness.records.trial_record import SCHEMA_VERSION, Failure, InterfaceCounters, Record, write
from harness.suites.expand_suite import MOST_TRIALS
from harness.suites.suite import Suite
from harness.suites.suite_file import load
from harness.suites.trial import Cluster, Model, PolicyChanges, Trial
from impl.plan.step_time import Machine
from tests.harness.cluster.test_rank_processes import until
from tests.harness.conftest import Zeropp
from tests.report.records import CRASHED, changed_steps, record_of

TOP = 'name = "q"\nquestion = "?"\n'
HEAD = f'{TOP}[defaults]\nmodel.name = "gpt-tiny"\nsequence = 32\ntokens_per_rank = 64\n'
RESULTS = Path("results/q")
SMALL = 'policy.weights = "int8:64"\npolicy.gradients = "int4:64"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must refuse: status 2, one line on standard error, nothing touched."""
    before = tree(folder)
    assert cli.main(arguments) == cli.REFUSED
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(("zeropp: ", "zeropp bench: "))
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert tree(folder) == before
    return err


def suite(folder: Path, body: str = SMALL, head: str = HEAD) -> str:
    (folder / "q.toml").write_text(head + body, encoding="utf-8")
    return "q.toml"


def record(failure: Failure | None = None, **fields: Any) -> Record:
    """Write a record of one rank with one step, which sent 2 MB between nodes at a loss of 5.5."""
    written = record_of(Trial(strategy="zero3", **fields), suite="q", failure=failure, code={}, units=[])
    ranks = []
    for rank in written.ranks[:1]:
        step = rank.steps[-1].model_copy(update={"loss": 5.5})
        row = (rank.ledger or [])[0].model_copy(update={"link": "inter", "bytes": 2_000_000})
        ranks.append(rank.model_copy(update={"steps": [step], "ledger": [row]}))
    written = written.model_copy(update={"ranks": ranks})
    write(RESULTS, written)
    return written


PADDING = "use smaller blocks or raise max_padding to 9.64: set policy.max_padding = 9.64 in the suite"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("polcy.weights = 1\n", "polcy.weights"),
        (SMALL + "cluster.nodes = 4096\n", "more than this machine can hold"),
        ('policy.weights = "int8:65536"\n', PADDING),
    ],
)
def test_bad_suites(folder: Path, capsys: pytest.CaptureFixture[str], body: str, message: str) -> None:
    """Running a bad suite is refused in one line and touches nothing."""
    error = refused(folder, capsys, "run", suite(folder, body))
    assert "q.toml" in error
    assert message in error


def test_bad_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A binary, missing or unreadable suite file is refused."""
    (folder / "binary.toml").write_bytes(b"\x00\xff\xfe")
    (folder / "folder.toml").mkdir()
    for command in ("run", "plan", "show", "report"):
        assert "not TOML" in refused(folder, capsys, command, "binary.toml")
        assert "No such file" in refused(folder, capsys, command, "missing.toml")
        assert "Is a directory" in refused(folder, capsys, command, "folder.toml")


@pytest.mark.parametrize(
    "arguments",
    [("rn",), ("run",), ("run", "a", "b"), ("plan", "--resluts", "x", "q.toml"), ("show",), ("--no-such",)],
)
def test_usage(folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    """An unknown command or option, or a missing argument, is one line."""
    assert "--help lists what there is" in refused(folder, capsys, *arguments)


@pytest.mark.parametrize("name", ["nothing", "abcdef012345", "../..", "*", "..", ""])
@pytest.mark.parametrize("command", ["show", "report"])
def test_unknown_id(folder: Path, capsys: pytest.CaptureFixture[str], command: str, name: str) -> None:
    """An unknown suite or id is refused, naming the suites with records and no other folder; so is an empty folder."""
    if name in ("../..", ".."):
        name = f"{name}/no-such-folder"
    record()
    for archives in ("predicted", "reference", "unfinished"):
        (folder / "results" / archives).mkdir()
        (folder / "results" / archives / "q.tar.xz").touch()
    text = refused(folder, capsys, command, name)
    if command == "report" and not name:
        assert "no suite given: name a suite (results holds q) or a results folder" in text
    else:
        assert f"unknown suite{' or id' if command == 'show' else ''} " in text
        assert "results holds q;" in text
    (folder / "results" / "empty").mkdir()
    if command == "show":
        assert "no records" in refused(folder, capsys, "show", "empty")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "q", "--follow", "--json"), "--follow and --json exclude each other: give one of them"),
        (("show", "q.toml", "--follow", "--reproduce"), "--follow and --reproduce exclude each other"),
        (("show", "q", "--reproduce", "--csv"), "--reproduce and --csv exclude each other"),
        (("show", "q", "--json", "--csv"), "--json and --csv exclude each other"),
        (("show", "bench-codecs", "--json"), "holds a benchmark's records: --json is for records of trials"),
        (("show", "bench-codecs", "--csv"), "holds a benchmark's records: --csv is for records of trials"),
        (
            ("report", "q", "--check"),
            "--check only compares README and docs with the committed records: remove SUITE",
        ),
        (("report", "--check", "--pdf", "--rate", "1 Gbit/s"), "remove --pdf, --rate"),
        (
            ("report", "q", "--explain", "a", "b", "c", "--png"),
            "--explain only prints one number: remove --png",
        ),
        (("report", "bench-codecs", "--explain", "a", "b", "c"), "--explain is for suites; remove it"),
        (
            ("bench", "formats", "x", "--csv", "--bits", "4"),
            "--bits adds lines below it: remove one of the two",
        ),
        (("bench", "formats", "x", "--csv", "--losses", "q"), "--losses adds lines below it"),
        (("bench", "formats", "x", "--bits", "inf"), "Invalid value for '--bits'"),
        (("bench", "codecs", "--seconds", "inf"), "Invalid value for '--seconds'"),
        (("calibrate", "results"), "results: exists, but is not a regular file; name the file to write"),
        (("snapshot", "q.toml", "", "--out", "results"), "--out results: exists, but is not a regular file"),
    ],
)
def test_an_option_acts_or_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """No option is taken and then ignored, no number is endless, and no folder is a file to write."""
    record()
    suite(folder, "steps = 2\n")
    (folder / "results" / "bench-codecs").mkdir()
    (folder / "results" / "bench-codecs" / "a.json").write_text('{"subject": "codecs"}', encoding="utf-8")
    assert says in refused(folder, capsys, *arguments)


def test_results_not_writable(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be written is refused before anything runs, or is measured for two minutes."""
    assert "m.toml: its folder cannot be written" in refused(folder, capsys, "calibrate", "/proc/m.toml")
    (folder / "file").write_text("")
    (folder / "dangling").symlink_to("nowhere/else")
    (folder / "loop").symlink_to("loop")
    for results in ("file/results", "/proc/none", "dangling", "dangling/results", "loop"):
        error = refused(folder, capsys, "run", suite(folder), "--results", results)
        assert "results folder cannot be written" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"schema_version": 99}',
            f"has schema version 99, but this program reads and writes version {SCHEMA_VERSION}",
        ),
        ('{"schema_version": "1"}', "has schema version '1', but this program reads and writes version 1;"),
        ("[" * 100_000, "0123456789ab.json: is not a record"),  # beyond Python's limits
        ('{"schema_version": ' + "9" * 5000 + "}", "0123456789ab.json: is not a record"),
    ],
    ids=["other", "text", "deep", "long"],
)
def test_records_that_cannot_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """They are left alone by every command, and one line says so."""
    (folder / "results" / "q").mkdir(parents=True)
    (folder / "results" / "q" / "0123456789ab.json").write_text(text)
    for arguments in (("run", suite(folder)), ("show", "q"), ("show", "0123"), ("report", "q")):
        assert message in refused(folder, capsys, *arguments)


def test_one_damaged_record(folder: Path, capsys: pytest.CaptureFixture[str], zeropp: Zeropp) -> None:
    """Every command names it and the remedy, of a copy too; ``show`` lists the others before."""
    whole = record()
    (folder / "results" / "q" / "0123456789ab.json").write_text('{"schema_version": 1,')
    for arguments in (("run", suite(folder)), ("report", "q"), ("show", "0123")):
        assert "; delete the file and run again" in refused(folder, capsys, *arguments)
    shown = zeropp("show", "q", status=cli.REFUSED)
    assert whole.id in shown.stdout
    assert re.fullmatch(
        r".*0123456789ab.json: is not a record.*; delete the file and run again\n", shown.stderr
    )
    write(folder / "copied", whole).rename(folder / "results" / "q" / "0123456789ab.json")
    assert f"0123456789ab.json: is a copy of the record {whole.id}; delete" in refused(
        folder, capsys, "report", "q"
    )


def test_what_killed_processes_left_is_no_result(
    folder: Path, capsys: pytest.CaptureFixture[str], zeropp: Zeropp, machinery: list[tuple[Any, ...]]
) -> None:
    """Half a record in a hidden folder is neither shown, nor archived, nor a suite, and does not stop a run."""
    whole = record(CRASHED)
    zeropp("archive", "q", "before")
    for place in (Path("results"), RESULTS):  # where an archive was unpacked, and where a record was written
        left = place / ".zeropp-unfinished-left"
        left.mkdir()
        (left / f"{whole.id}.json").write_text("{")
    assert whole.id in zeropp("show", whole.id[:5]).stdout
    assert whole.id in zeropp("show", "q").stdout
    assert "results holds q;" in refused(folder, capsys, "report", "nothing")
    zeropp("archive", "q", "after")
    packed = [folder / name / "q.tar.xz" for name in ("before", "after")]
    assert packed[0].read_bytes() == packed[1].read_bytes()
    zeropp("run", suite(folder))
    assert zeropp("report", "q").stdout == "results/q/report.html\n"


def test_a_record_of_too_late_a_sweep_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal has the path of the record, which the user is to delete."""
    record(CRASHED)
    written = record_of(
        Trial(strategy="zero3", seed=1), suite="q", failure=CRASHED, sweep=MOST_TRIALS, code={}, units=[]
    )
    write(RESULTS, written)
    assert refused(folder, capsys, "run", suite(folder)) == (
        f"zeropp: results/q/{written.id}.json: this record belongs to sweep {MOST_TRIALS + 1}, but sweeps have numbers "
        f"up to {MOST_TRIALS}; delete this record\n"
    )


def test_records_of_another_suite_of_that_name(
    folder: Path, zeropp: Zeropp, machinery: list[tuple[Any, ...]]
) -> None:
    """A run reports how many records in its folder are of trials that its suite does not have."""
    assert "also holds" not in zeropp("run", suite(folder)).stderr
    for seed in (1, 2):
        record(CRASHED, seed=seed)
    assert "also holds 2 records of trials that this suite does not have" in zeropp("run", "q.toml").stderr


def test_bytes_of_peers_are_those_of_the_interfaces(folder: Path, zeropp: Zeropp) -> None:
    """Without a ledger they are what interfaces counted over the timed steps, marked so in both tables."""
    counted = record()
    rank = counted.ranks[0].model_copy(update={"ledger": None})
    counters = [InterfaceCounters(node=node, tx_bytes=500_000, tx_packets=1) for node in (0, 1)]
    write(RESULTS, counted.model_copy(update={"ranks": [rank], "interfaces": counters}))
    for name in ("q", counted.id):
        text = zeropp("show", name).stdout
        assert re.search(r"between +\n.*MB/step.* 1 \*|between nodes, MB/step +1 \*", text, re.DOTALL)
        assert "*: counted by the interfaces of the nodes" in text


def test_other_code(
    folder: Path, capsys: pytest.CaptureFixture[str], zeropp: Zeropp, machinery: list[tuple[Any, ...]]
) -> None:
    """Records of other code are refused before anything runs; failures with nothing measured stop no run."""
    other = record()
    error = refused(folder, capsys, "run", suite(folder))
    assert "holds 1 record of another version of the code (hash of sources None, here " in error
    (folder / "results" / "q" / f"{other.id}.json").unlink()
    record(CRASHED)
    zeropp("run", "q.toml")
    assert machinery == [("sweep", "q", 1, RESULTS), ("report", RESULTS)]


def test_show_folder(folder: Path, zeropp: Zeropp) -> None:
    """A results folder is shown as a table, failures with their message and log."""
    good = record()
    bad = record(Failure(kind="crashed", message="it [broke]", log="logs/x.log"), repeat=1)
    for name in ("q", "results/q"):
        text = zeropp("show", name).stdout
        assert good.id in text
        assert re.search(r"between +\n.*MB/step.* 2 ", text, re.DOTALL)
        assert f"{bad.id} crashed: it [broke]; log: results/q/logs/x.log\n" in text
    assert "\nlog: results/q/logs/x.log\n" in zeropp("show", bad.id).stdout


def test_show_record(folder: Path, zeropp: Zeropp) -> None:
    """One record is shown by its id or the start of it; rates and limits on memory as a suite writes them."""
    cluster = Cluster(rate="0.05 Gbit/s")  # type: ignore[arg-type]
    identity = record(cluster=cluster, memory_limit="1536 MiB").id
    for name in (identity, identity[:5]):
        lines = [" ".join(line.split()) for line in zeropp("show", name).stdout.splitlines()]
        assert {"cluster.rate 50 Mbit/s", "memory_limit 1.5 GiB", f"id {identity}", "loss 5.5000"} <= {*lines}


def test_ids_are_whole_in_narrow_terminals(folder: Path) -> None:
    """An id can be copied: it is never broken over lines, nor is a log's path."""
    changes = {
        "policy": PolicyChanges(weights="int8:2048", gradients="int4:256"),
        "model": Model(name="gpt-tiny", arguments={"width": 1024}),
        "cluster": Cluster(nodes=4, rate="100 Mbit/s"),  # type: ignore[arg-type]
        "sequence": 64,
    }
    failure = Failure(kind="crashed", message="rank 0: " + "many words " * 9, log="logs/0123456789ab.log")
    records = [record(), record(failure, repeat=1, **changes)]
    for width in (40, 80, 100):
        shown = io.StringIO()
        terminal.records(records, Console(file=shown, width=width), Path("results/a-suite-of-some-name"))
        text = shown.getvalue()
        for identity in (written.id for written in records):
            assert any(identity in line.split() for line in text.splitlines())
        assert "results/a-suite-of-some-name/logs/0123456789ab.log" in text
        assert "\u2026" not in text


def test_show_means_over_ranks(folder: Path, zeropp: Zeropp) -> None:
    """The loss that is shown is the mean over ranks, whatever the strategy."""
    first = record()
    (rank,) = changed_steps(first, lambda step: {"loss": step.loss + 1}).ranks
    write(RESULTS, first.model_copy(update={"ranks": [*first.ranks, rank]}))
    assert "6.0000" in zeropp("show", "q").stdout


def test_plan(folder: Path, zeropp: Zeropp) -> None:
    """A plan names the question, every combination and what cannot run, and writes nothing."""
    suite(folder, SMALL + '[matrix]\nstrategy = ["zero3", "zeropp"]\ncluster.nodes = [2, 4096]\n')
    before = tree(folder)
    text = zeropp("plan", "q.toml", status=cli.SOME_FAILED).stdout
    assert tree(folder) == before
    assert "4 trials" in text
    assert "more than this machine can hold" in text
    assert "2 of 4 trials cannot run here: `zeropp run` refuses the suite\n" in text
    suite(folder, SMALL + '[matrix]\nstrategy = ["zero3", "zeropp"]\n')
    assert "cannot run here" not in zeropp("plan", "q.toml").stdout


def test_seeds_of_a_cell_are_one_row_of_a_plan(folder: Path, zeropp: Zeropp) -> None:
    """A plan counts them, and says if seeds or steps are too few for a verdict."""
    for seeds, steps, count in (
        (3, 4, "6 trials: 2 combinations x 3 seeds x 1 repeat. "),
        (6, 99, "12 trials: 2 combinations x 6 seeds x 1 repeat. "),
    ):
        body = f"validate_every = 0\nwarmup = 1\nsteps = {steps}\n[matrix]\nseed = {list(range(seeds))}\n"
        suite(folder, f'{SMALL}{body}strategy = ["zero3", "zeropp"]\n')
        text = " ".join(zeropp("plan", "q.toml").stdout.split())
        assert count in text
        assert text.count(" zeropp ") == 1
        short = "Too short for a verdict on losses: 5 steps (100 are needed) and 3 seeds (6 are needed)."
        assert (short in text, "Too short" in text) == (seeds < 6, seeds < 6)


@pytest.mark.parametrize("table", ["defaults", "matrix"])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_an_unknown_model_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, table: str
) -> None:
    """With the names there are, before a table of empty rows is printed."""
    name = '"gpt-smal"' if table == "defaults" else '["gpt-tiny", "gpt-smal"]'
    error = refused(folder, capsys, command, suite(folder, f"[{table}]\nmodel.name = {name}\n", TOP))
    assert f'[{table}] model.name = "gpt-smal": expected one of gpt-tiny, gpt-small, ' in error
    assert "vit-small or 'module:function'; did you mean 'gpt-small'?" in error


def test_plan_says_which_limit_stops_each_combination(folder: Path, zeropp: Zeropp) -> None:
    """By a number in its row and a line with the limit's numbers, of memory limits too."""
    padded = 'policy.weights = "int8:4096"\n[matrix]\nstrategy = ["zero3", "zeropp", "ddp"]\n'
    suite(folder, padded + 'memory_limit = ["1 MiB", "1 GiB"]\n')
    lines = [line.rstrip() for line in zeropp("plan", "q.toml", status=cli.SOME_FAILED).stdout.splitlines()]
    reasons = {line.partition(":")[0]: line for line in lines if line[:2] in ("1:", "2:", "3:")}
    (limit,) = [
        number for number, line in reasons.items() if "(1 of 6 combinations): not run: a rank holds " in line
    ]
    assert "memory_limit is 1,048,576" in reasons[limit]
    ends = {name: {line[-9:] for line in lines if line.split()[:1] == [name]} for name in ("zero3", "zeropp")}
    for name, common in (("zero3", True), ("zeropp", False)):
        (reason,) = (reasons[end.rpartition("no: ")[2]] for end in ends[name])
        assert "elements would be padding" in reason
        assert "max_padding allows 20.0%) for blocks of 4096 (the common multiple of " in reason
        assert ("of bf16, align = 4096) on 4 ranks" if common else "of int8:4096, ") in reason
        assert (
            "its units are aligned to 4096 elements, the least common multiple of the blocks" in reason
        ) == common
    outcomes = sorted(line.rpartition("  ")[2] for line in lines if line.split()[:1] == ["ddp"])
    assert outcomes == [f"over its limit: {limit}", "yes"]


def test_plan_and_show_mark_padding_and_not_its_limit(folder: Path, zeropp: Zeropp) -> None:
    """Bytes of models padded by more than 5 % are marked and explained; the limit is no column."""
    body = '[matrix]\nstrategy = ["zero3", "zeropp"]\n[[override]]\nmatch.strategy = "zeropp"\n'
    suite(folder, body + "set.policy.max_padding = 0.5\n")
    text = zeropp("plan", "q.toml").stdout
    assert re.search(r"^The same in all rows: parameters: [\d,]+ ¶", text, re.MULTILINE)
    assert (
        "¶: padding adds more than 5% to the model's elements, at most 16.6%; padding is sent and held"
        in text
    )
    record(policy={"max_padding": 0.5})
    unpadded = record()
    plain = zeropp("show", "q").stdout
    for units, marked in (([("u", 1000, 1050)], False), ([("u", 1000, 1051)], True)):
        write(RESULTS, unpadded.model_copy(update={"units": units}))
        text = zeropp("show", "q").stdout
        assert (" 2 ¶ " in text, "at most 5.1%; padding is sent" in text) == (marked, marked)
        assert "max_padding" not in text + plain


def test_plan_tells_what_became_of_a_configuration(folder: Path, zeropp: Zeropp) -> None:
    """What it says of keys is of the model: ZeRO++ does nothing for a toy whose parameters persist."""
    table = "{ stage = 3, zero_quantized_weights = true, overlap_comm = true }"
    suite(folder, SMALL + f'strategy = "recipe"\ndeepspeed_config.zero_optimization = {table}\n')
    text = " ".join(zeropp("plan", "q.toml").stdout.split())
    assert "overlap_comm = true: without effect: " in text
    assert "zero_quantized_weights = true: without effect: all parameters persist" in text


def test_plan_of_paper_scale(zeropp: Zeropp) -> None:
    """Models and clusters of the paper are planned here, and running them is refused with numbers."""
    path = machine.ROOT / "suites" / "paper_scale.toml"
    out = zeropp("plan", path, status=cli.SOME_FAILED).stdout
    assert "gpt-100b" in out
    assert len(re.findall(r" 6\.347 +12\.67 ", out)) == 4  # GB of hpZ's copy of ZeRO++, kept either way
    assert "24 of 24 trials cannot run here" in zeropp("run", path, status=cli.REFUSED).stderr


@pytest.fixture
def machinery(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A sweep and a report that only note how they were called."""
    calls: list[tuple[Any, ...]] = []

    def run_sweep(suite: Suite, batches: Any, results: Path, console: object, **_: object) -> object:
        name = suite.name
        calls.append(("sweep", name, len(next(iter(batches)).trials), results))
        return types.SimpleNamespace(ok=1, failed=name.count("bad"), skipped=0, interrupted=False)

    def build(results: Path, **_: object) -> Path:
        calls.append(("report", results))
        return results / "report.html"

    def of_folder(results: Path) -> object:
        return types.SimpleNamespace(lines=["ZeRO++ is 2x faster.", "But."])

    monkeypatch.setattr("harness.runs.sweep.run_sweep", run_sweep)
    monkeypatch.setattr("report.build.build", build)
    monkeypatch.setattr("report.verdicts.of_folder", of_folder)
    return calls


def test_run(folder: Path, zeropp: Zeropp, machinery: list[tuple[Any, ...]]) -> None:
    """A run sweeps, builds the report and prints nothing but its path on standard output, and the sentence
    of its head beside its progress; or neither. Failed trials leave a report and exit status 1.
    """
    process = zeropp("run", suite(folder), "--results", "elsewhere")
    assert process.stdout == "elsewhere/q/report.html\n"
    assert process.stderr.endswith("\nZeRO++ is 2x faster.\nBut.\n")
    assert machinery == [("sweep", "q", 1, Path("elsewhere/q")), ("report", Path("elsewhere/q"))]
    assert zeropp("run", "q.toml", "--no-report").stdout == ""
    assert machinery[2:] == [("sweep", "q", 1, RESULTS)]
    process = zeropp("run", suite(folder, head=HEAD.replace('"q"', '"bad"')), status=cli.SOME_FAILED)
    assert process.stdout == "results/bad/report.html\n"


def test_run_with_sweeps(
    folder: Path, capsys: pytest.CaptureFixture[str], zeropp: Zeropp, machinery: list[tuple[Any, ...]]
) -> None:
    """The first sweep's trials are requested at once, others after them; several are said to be one occasion; too many
    are refused.
    """
    ran = " ".join(zeropp("run", suite(folder), "--sweeps", 3).stderr.split())
    assert "3 sweeps of 1 trial (1 repeat)" in ran
    assert "are one occasion" in ran
    assert "run this command again with --sweeps 4." in ran
    assert "occasion" not in zeropp("run", suite(folder)).stderr
    assert machinery[0] == ("sweep", "q", 1, RESULTS)
    assert "--sweeps" in refused(folder, capsys, "run", "q.toml", "--sweeps", "0")
    assert "3000 trials, but at most 2000" in refused(folder, capsys, "run", "q.toml", "--sweeps", "3000")


def test_seconds_that_no_trial_ran_with_are_named(
    folder: Path, zeropp: Zeropp, machinery: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report reads the key in the file with which trials ran; a key that was added since is not ignored silently."""
    top = HEAD.replace("[defaults]", 'seconds = "other"\n[defaults]')
    file = suite(folder, "steps = 120\nvalidate_every = 40\n", top)
    written = record().model_copy(update={"run": "0" * 16})
    write(RESULTS, written)
    named = ""
    monkeypatch.setattr("report.seconds_key.named", lambda *_: named)
    monkeypatch.setattr(machine, "code", dict)
    told = " ".join(zeropp("run", file).stderr.split())
    assert "run `zeropp report results/q --seconds other --results results`" in told
    named = "other"
    assert "--seconds" not in zeropp("run", file).stderr


def test_run_of_one_trial(folder: Path, zeropp: Zeropp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of the second sweep runs as a trial of the second sweep."""
    batches: list[Any] = []

    def run_sweep(_: Suite, given: Any, *__: object, **___: object) -> object:
        batches.extend(given)
        return types.SimpleNamespace(ok=1, failed=0, skipped=0, interrupted=False)

    monkeypatch.setattr("harness.runs.sweep.run_sweep", run_sweep)
    (second,) = load(folder / suite(folder)).sweep(1)
    zeropp("run", "q.toml", "--sweeps", 2, "--only", second.id, "--no-report")
    assert [(batch.sweep, batch.trials) for batch in batches] == [(1, (second,))]


def test_a_slurm_job_gets_all_options(folder: Path, zeropp: Zeropp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's command has the options of this one, and the printed command can be typed as it stands."""
    jobs: list[Any] = []
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("harness.runs.slurm.submit", lambda arguments, *_: jobs.append(arguments) or "7")
    monkeypatch.setattr(machine_file, "check_host", lambda *_: None)
    here = Machine(
        name="here", source="made up", fixed=1.0, per_token=0.0, efficiency=1.0, fewest=1, most=1e6
    )  # fmt: skip
    machine_file.write(folder / "here.toml", here)
    body = 'cluster = { nodes = 2, launcher = "slurm", transport = "gloo" }\n'
    (folder / "my suite.toml").write_text(HEAD + body, encoding="utf-8")
    process = zeropp("run", "my suite.toml", "--machine", "here.toml", "--retry-failed")
    (arguments,) = jobs
    assert arguments[3:] == [
        str(folder / "results"), "--sweeps", "1", "--machine", str(folder / "here.toml"), "--retry-failed",
    ]  # fmt: skip
    follow = ["zeropp", "show", "my suite.toml", "--results", "results", "--follow"]
    assert shlex.split(process.stderr.splitlines()[-1]) == follow


def test_an_interrupted_calibration_ends_as_interrupted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is status 130, not a refusal that blames failed trials."""
    interrupted = types.SimpleNamespace(ok=0, failed=0, skipped=0, interrupted=True)
    monkeypatch.setattr("harness.bench.calibration.run_sweep", lambda *_: interrupted)
    assert cli.main(["calibrate", "here.toml"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "zeropp: interrupted\n"
    assert not (folder / "here.toml").exists()


def test_a_sweep_is_shown_beside_its_repeat(folder: Path, zeropp: Zeropp) -> None:
    """Once there is a second one; a single sweep has no column."""
    first = record()
    assert "sweep" not in zeropp("show", "q").stdout
    write(RESULTS, first.model_copy(update={"sweep": 1}))
    assert "sweep" in zeropp("show", "q").stdout


def test_report(folder: Path, zeropp: Zeropp, machinery: list[tuple[Any, ...]]) -> None:
    """A report is built from a suite's name, file or folder."""
    record()
    suite(folder)
    for name in ("q", "q.toml", "results/q"):
        assert zeropp("report", name).stdout == "results/q/report.html\n"


def test_a_folder_of_the_suites_name_does_not_hide_its_results(folder: Path, zeropp: Zeropp) -> None:
    """A suite ``q`` beside a folder ``q`` of something else is found by its name."""
    written = record()
    (folder / "q").mkdir()
    (folder / "q" / "notes.txt").write_text("mine")
    assert written.id in zeropp("show", "q").stdout
    zeropp("archive", "q", "kept")
    assert (folder / "kept" / "q.tar.xz").is_file()


def test_doctor(zeropp: Zeropp) -> None:
    """The doctor names everything a trial may use, and leaves with status 0."""
    text = zeropp("doctor").stdout
    features = ["torch", "CuPy", "NVML", "tbf", "shm", "DeepSpeed", "compiler", "cores", "memory"]
    assert all(feature in text for feature in ["network namespaces", *features])


MAIN = "import sys; from harness.cli import main; sys.exit(main())"


def by_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run some code in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(machine.ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        (("plan", "--help"), "torch"),
        (("plan", "q.toml"), "torch"),
        (("plan", "q.toml"), "pandas"),
        (("plan", "cut/q.toml"), "torch._dynamo"),
        (("plan", "cut/q.toml"), "torch.distributed.fsdp"),
    ],
)
def test_what_takes_seconds_is_not_imported(folder: Path, command: tuple[str, ...], heavy: str) -> None:
    """Torch for help, and to predict a preset; its compiler or FSDP to predict a model that has to be built."""
    suite(folder, SMALL + '[matrix]\nstrategy = ["zeropp", "ddp"]\n')
    (folder / "cut").mkdir()
    suite(folder / "cut", SMALL + "policy.largest_unit = 100_000_000\n" + '[matrix]\nstrategy = ["zeropp"]\n')
    measured = "from harness import expected_time; expected_time.core_flops = lambda: 1e10; "
    code = f"import sys; from harness.cli import main; {measured}status = main(sys.argv[2:]); "
    process = by_python(code + "assert sys.argv[1] not in sys.modules; sys.exit(status)", heavy, *command)
    assert process.returncode == 0, process.stderr


COMMANDS = [
    (), ("plan",), ("run",), ("show",), ("report",), ("train",), ("doctor",), ("checkpoints",), ("export",),
    ("bench",), *(("bench", name) for name in ("codecs", "collectives", "overlap")),
    ("check",), ("check", "codecs"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_cuts_nothing(command: tuple[str, ...], zeropp: Zeropp, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns every option's name and every command's line of help is whole."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    text = zeropp(*command, "--help").stdout
    assert "\u2026" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert "--help" in text
    for cut in (line for line in text.splitlines() if line.rstrip().endswith("...")):
        assert cut.startswith("Usage: ")
    if command == ("train",):
        longest = (
            "--deepspeed-activation-checkpointing",
            "--pipeline-model-parallel-size",
            "--save-interval",
        )
        assert all(name in text for name in longest)


def test_no_command(zeropp: Zeropp) -> None:
    """Without a command the help is printed, and nothing is wrong; or the version and nothing else."""
    process = zeropp()
    assert ("report" in process.stdout, process.stderr) == (True, "")
    assert zeropp("--version").stdout.count("\n") == 1


@pytest.mark.parametrize(
    "raised",
    ["KeyboardInterrupt", "ImportError('initialization failed') from KeyboardInterrupt()"],
    ids=["plain", "inside an extension in C"],
)
def test_interrupt_while_importing(raised: str) -> None:
    """Ctrl-C before the command line is imported ends in the same line."""
    process = by_python(f"import harness.cluster.interrupts; raise {raised}")
    assert (process.returncode, process.stderr) == (cli.INTERRUPTED, "zeropp: interrupted\n")


LOST = """
import ctypes, os, signal, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(1))()
sys.meta_path.insert(0, Finder())
from harness import cli
sys.argv = ["zeropp", *sys.argv[1:]]
status = cli.main()
print("went on")
sys.exit(status)
"""


@pytest.mark.parametrize("arguments", [("run", "q.toml"), ("train",), ("export", "a", "b")], ids=" ".join)
def test_interrupt_where_no_exception_passes(folder: Path, arguments: tuple[str, ...]) -> None:
    """Ctrl-C inside an import that swallows exceptions, as C callbacks do: nothing goes on or is left."""
    suite(folder)
    before = tree(folder)
    ended = by_python(LOST, *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr) == (cli.INTERRUPTED, "", "zeropp: interrupted\n")
    assert tree(folder) == before


@pytest.mark.parametrize(
    "seconds", [0.7, 2.1, *(pytest.param(later, marks=pytest.mark.nightly) for later in (1.4, 3.0, 5.0))]
)
def test_interrupt_at_any_moment(folder: Path, seconds: float) -> None:
    """Whenever Ctrl-C comes: no traceback, exit status 130, no process and no half-written file left."""
    suite(folder, 'strategy = "single"\nsteps = 1000000\ntimeout_seconds = 60\n')
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "run", "q.toml"],
        env={**os.environ, "PYTHONPATH": str(machine.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == cli.INTERRUPTED, error
    assert "Traceback" not in error
    assert error.endswith("zeropp: interrupted\n")
    until(lambda: not any(_session(pid) == process.pid for pid in psutil.pids()))
    left = {Path(name).name for name in tree(folder) if not name.endswith(".json")}
    assert left <= {"q.toml", "results", "q", ".lock", "runs", "journal.jsonl"}


def _session(pid: int) -> int | None:
    """The session of a process; None if it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
