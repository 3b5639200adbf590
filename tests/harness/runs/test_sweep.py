"""Sweeps leave a record of every trial, also if it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from harness.cluster.link import Link
from harness.cluster.node_supervisors import Node, Nodes
from harness.cluster.port import Port
from harness.errors import LinkError, Refusal
from harness.measure import machine, run_environment
from harness.records import chained_journal
from harness.records.trial_record import RecordError, read, read_all
from harness.runs import feasibility as plan
from harness.runs.further_repeats import Batch, single
from harness.runs.sweep import SweepOutcome, finished, locked, run_sweep
from harness.suites.suite import Suite
from harness.suites.trial import Trial
from harness.workloads.models import GPT, GPTShape
from tests.harness.cluster.test_rank_processes import until
from tests.harness.runs.test_rank_trial import trial as small
from tests.report.records import record_of

ROOT = Path(__file__).resolve().parents[3]
SHAPED: dict[str, Any] = {"link": "shaped", "rate": "50 Mbit/s"}
ADAPTERS: dict[str, Any] = {"link": "real", "transport": "nccl", "device": "cuda"}


def trial(strategy: str, *, rate: str = "unshaped", kind: str = "none", **changes: Any) -> Trial:
    cluster = {"nodes": 2, "ranks_per_node": 1, "link": kind, "rate": rate}
    return small("stdlib", strategy, **{"cluster": cluster, "steps": 2, "warmup": 1, **changes})


def suite_with(**answers: str) -> Suite:
    return Suite.model_validate({"name": "test", "question": "?", "on_failure": answers})


def sweep(
    trials: Sequence[Trial] | Iterable[Batch], results: Path, suite: Suite | None = None, **options: Any
) -> tuple[SweepOutcome, str]:
    shown = io.StringIO()
    batches = [Batch(0, tuple(trials))] if isinstance(trials, list) else trials
    console = Console(file=shown, width=60)
    outcome = run_sweep(suite or suite_with(), batches, results, console, **options)
    print(shown.getvalue())  # pytest shows it if the test fails
    return outcome, shown.getvalue()


def diverging(sequence: int) -> Any:
    """Return a model whose rank dies in its first step."""

    class Dying(GPT):
        def forward(self, tokens: Any, targets: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    return Dying(GPTShape(1, 16, 1), sequence)


def slow(sequence: int) -> Any:
    """Return a model that takes its time."""

    class Slow(GPT):
        def forward(self, tokens: Any, targets: Any) -> Any:
            time.sleep(5)
            return super().forward(tokens, targets)

    return Slow(GPTShape(1, 16, 1), sequence)


def test_trials_leave_records_and_are_not_run_twice(tmp_path: Path) -> None:
    """Each trial's record is named by its id, has what ran, and is skipped the next time."""
    trials = [trial(strategy, seed=seed) for seed in range(2) for strategy in ("single", "ddp", "zeropp")]
    outcome, shown = sweep(trials[:4], tmp_path)
    assert outcome == SweepOutcome(ok=4, failed=0, skipped=0)
    lines = [line.split()[0] for line in shown.splitlines() if line.startswith("[")]
    assert lines == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    outcome, shown = sweep(trials, tmp_path)
    assert outcome == SweepOutcome(ok=2, failed=0, skipped=4)
    assert "4 of 6 trials are done" in shown
    records = read_all(tmp_path)
    assert [record.order for record in records] == list(range(6))
    for expected, record in zip(trials, records, strict=True):
        assert record.id == expected.id
        assert Trial.from_canonical(record.trial) == expected
        assert record.failure is None
        assert record.link.kind == "none"
        assert record.reference_loss is not None
        assert len(record.ranks) == (1 if expected.strategy == "single" else 2)
        assert bool(record.link.probed_mbit) == (expected.strategy != "single")
    assert not (tmp_path / "logs").exists()


def test_a_sweep_adds_the_line_that_a_killed_run_left_out(tmp_path: Path) -> None:
    """A run that was killed between a record and its line of the journal is completed; the trial does not run again."""
    only = trial("single")
    sweep([only], tmp_path)
    whole = (tmp_path / chained_journal.JOURNAL).read_bytes()
    (tmp_path / chained_journal.JOURNAL).unlink()
    outcome, _ = sweep([only], tmp_path)
    assert outcome == SweepOutcome(skipped=1)
    assert (tmp_path / chained_journal.JOURNAL).read_bytes() == whole


@pytest.mark.nightly
def test_a_sweep_keeps_nccls_rules(tmp_path: Path) -> None:
    """Policies on a calibrated and probed paced link, and torch's engines, run with a backend that enforces NCCL's
    rules.
    """
    policies = [trial(name, kind="paced", rate="1 Gbit/s") for name in ("zero3", "zero3-flat", "zeropp")]
    trials = [*policies, *(trial(strategy) for strategy in ("ddp", "fsdp2", "zeropp"))]
    rules = {"transport": "tests.support.nccl_rules"}
    ruled = [plain.model_copy(update={"cluster": plain.cluster.model_copy(update=rules)}) for plain in trials]
    outcome, shown = sweep(ruled, tmp_path)
    assert outcome == SweepOutcome(ok=6, failed=0, skipped=0), shown
    for record in read_all(tmp_path):
        assert record.link.probed_mbit
        if record.link.kind == "paced":
            assert record.link.calibrated_mbit


def test_further_batches_follow_from_records_and_belong_to_their_sweep(tmp_path: Path) -> None:
    """The next batch is drawn when all earlier trials have records, and records have the number of their sweep;
    progress says why there are further trials, and counts them.
    """
    first, later, last = (trial("single", repeat=repeat) for repeat in range(3))

    def batches() -> Iterator[Batch]:
        for number, before, current in ((0, None, first), (0, first, later), (1, later, last)):
            assert before is None or before.id in {record.id for record in read_all(tmp_path)}
            yield Batch(number, (current,))

    outcome, shown = sweep(batches(), tmp_path, total=2)
    assert outcome == SweepOutcome(ok=3)
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("[")] == ["[1/2]", "[2/2]", "[3/3]"]
    assert "some intervals are not narrow enough: 1 trial" in lines
    assert "sweep 2: 1 trial" in lines
    records = read_all(tmp_path)
    assert [record.id for record in records] == [first.id, later.id, last.id]
    assert [(record.sweep, record.order) for record in records] == [(0, 0), (0, 1), (1, 2)]
    assert sweep(batches(), tmp_path)[0] == SweepOutcome(skipped=3)


def test_a_sweep_is_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished sweep of another machine stays, and this machine can add one; an unfinished one is refused before
    anything runs.
    """
    first, second = trial("single"), trial("single", repeat=1)
    sweep([first], tmp_path)
    monkeypatch.setattr(machine, "pool_key", lambda *_: "another")
    batches = (Batch(0, (first,)), Batch(1, (second,)))
    assert sweep(batches, tmp_path)[0] == SweepOutcome(ok=1, skipped=1)
    assert sorted((r.sweep, r.pool == "another") for r in read_all(tmp_path)) == [(0, False), (1, True)]
    with pytest.raises(
        Refusal, match=r"sweep 1 was begun on another machine or .* \(hash \w+, here another\): finish"
    ):
        sweep([first, trial("single", seed=9)], tmp_path)
    assert len(read_all(tmp_path)) == 2


def test_a_trial_that_runs_alone_belongs_to_its_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record has the number of its sweep and its place among all trials; a sweep of another machine is refused."""
    pair = {"combinations": (trial("single"), trial("single", seed=1)), "repeats": 2}
    suite = Suite.model_validate({"name": "test", "question": "?", **pair})
    before, last = suite.sweep(1)[0], suite.sweep(1)[-1]
    assert sweep((single(suite, last),), tmp_path)[0] == SweepOutcome(ok=1)
    (record,) = read_all(tmp_path)
    assert (record.id, record.sweep, record.order) == (last.id, 1, 7)
    monkeypatch.setattr(machine, "pool_key", lambda *_: "another")
    with pytest.raises(Refusal, match="sweep 2 was begun on another machine"):
        sweep((single(suite, before),), tmp_path)
    assert single(suite, suite.sweep(0)[1]).first == 1


def test_a_changed_question_reaches_all_records(tmp_path: Path) -> None:
    """Also those of sweeps that a run does not ask for, which the report compares with the others."""
    base, other = (Trial(strategy=name, steps=2, warmup=0) for name in ("zero3", "zeropp"))
    roles = {base.id: "baseline", other.id: "contrast"}
    suite = Suite.model_validate(
        {"name": "test", "question": "?", "margin": 14, "combinations": (base, other), "roles": roles}
    )
    for number, each in product(range(2), (base, other)):
        repeated = each.model_copy(update={"repeat": number})
        chained_journal.append(tmp_path, record_of(repeated, sweep=number, order=number))
    assert sweep((Batch(0, suite.sweep(0)),), tmp_path, suite)[0] == SweepOutcome(skipped=2)
    records = read_all(tmp_path)
    assert {(record.sweep, record.role, record.margin) for record in records} == {
        (number, role, 14) for number, role in product(range(2), ("baseline", "contrast"))
    }
    assert chained_journal.verify(tmp_path, records) == []


def test_a_further_repeat_that_runs_alone_follows_all_others() -> None:
    """With ``until``, its place in the order of trials depends on results, and it is put behind all certain ones."""
    suite = Suite.model_validate(
        {"name": "test", "question": "?", "repeats": "until 2 %", "combinations": (trial("single"),)}
    )
    batch = single(suite, trial("single", repeat=29))
    assert (batch.sweep, batch.first, len(batch.beside)) == (1, 12, 19)


@pytest.mark.parametrize(
    ("threshold", "kinds"),
    [(100_000, ["without effect", "without effect"]), (0, ["honoured", "changed"])],
)
def test_a_deepspeed_configuration_has_findings(threshold: int, kinds: list[str], tmp_path: Path) -> None:
    """The trial sends what its policy predicts, and its record has a finding for each key.

    Below a threshold of 100,000 elements, all parameters of a toy model persist, which ZeRO++ leaves alone.
    """
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold, "zero_quantized_weights": True}
    config = json.dumps({"zero_optimization": zero | {"zero_hpz_partition_size": 16}})
    recipe = trial("recipe", deepspeed_config=config, policy={"max_padding": 1e9})
    outcome, text = sweep([recipe], tmp_path)
    assert outcome.failed == 0, text
    (record,) = read_all(tmp_path)
    assert [finding.kind for finding in record.findings] == ["honoured", "honoured", *kinds]
    assert record.predicted.equal


def test_a_trial_beyond_its_limit_is_recorded_and_not_run(tmp_path: Path) -> None:
    """Its record has a failure of kind ``memory`` with the numbers and the model's size, and the trial is not tried
    again.
    """
    large = trial("zero3", memory_limit="0.1 MiB", model={"name": f"{__name__}:slow"})
    small = trial("zero3", memory_limit="64 MiB")
    outcome, _ = sweep([large, small], tmp_path)
    assert outcome == SweepOutcome(ok=2, failed=0, skipped=0), "that it does not fit is the answer"
    record = read(tmp_path / f"{large.id}.json")
    assert record.failure.kind == "memory"
    assert "not run: a rank holds" in record.failure.message
    assert "memory_limit is 104,858" in record.failure.message
    assert record.parameters > 0
    assert record.ranks == []
    assert sweep([large, small], tmp_path)[0] == SweepOutcome(skipped=2)


def test_an_engine_beyond_its_limit_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit also applies to the bytes that the engine counted, after the run."""
    predicted = plan.forecast
    limited = trial("zero3", memory_limit="0.1 MiB")

    def blind(trials: Iterable[Trial], host: plan.Host) -> list[plan.Forecast]:
        return [dataclasses.replace(forecast, failure=None) for forecast in predicted(trials, host)]

    monkeypatch.setattr("harness.runs.sweep.forecast", blind)
    assert sweep([limited], tmp_path)[0].failed == 1
    failure = read(tmp_path / f"{limited.id}.json").failure
    assert failure.kind == "memory"
    assert failure.message.startswith("it ran, and a rank holds")


def test_a_failed_trial_is_a_record_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """Records of crashed, refused and late trials have the failure and its log, and the trials after them run."""
    trials = [
        trial("ddp", model={"name": f"{__name__}:diverging"}),
        trial("fsdp2", kind="paced", rate="50 Mbit/s"),
        trial("zeropp", policy={"max_padding": 0.05}),
        trial("single", model={"name": f"{__name__}:slow"}, timeout_seconds=3),
        trial("exact", optimizer={"name": "SGD", "arguments": {"lr": 1.0, "weight_decay": 1e30}}),
        trial("zero3"),
    ]
    outcome, shown = sweep(trials, tmp_path)
    assert outcome == SweepOutcome(ok=1, failed=5, skipped=0)
    failures = [read(tmp_path / f"{failed.id}.json").failure for failed in trials]
    assert failures[-1] is None
    messages = {
        "killed": "was killed by signal 9",
        "link": "'fsdp2' sends its own messages",
        "refused": "padding",
        "timeout": "after 3 s",
        "wrong": "the loss of rank",
    }
    for failure, (kind, message) in zip(failures, messages.items(), strict=False):
        assert failure.kind == kind
        assert message in failure.message
        assert message in shown
        assert "\n" not in failure.message
    for failure in (failures[0], failures[2], failures[3]):
        assert (tmp_path / failure.log).read_text().startswith("== rank 0")
    wrong = read(tmp_path / f"{trials[4].id}.json")  # it diverged: its losses until then are kept
    assert wrong.failure.losses
    assert all(map(math.isfinite, wrong.failure.losses))
    assert not wrong.measured
    # Refused and killed trials may pass and run again; the others have failed for good.
    assert sweep(trials, tmp_path)[0] == SweepOutcome(failed=5, skipped=3)


def test_an_edited_model_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of a user's model is skipped while nothing has changed, and run again after an edit; its log is then
    removed.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    good = "from harness.workloads.models import GPT, GPTShape\ndef build(sequence):\n    {}\n"
    model = tmp_path / "edited_model.py"
    model.write_text(good.format("raise ValueError('not yet')"))
    edited = trial("single", model={"name": "edited_model:build"})
    outcome, shown = sweep([edited], tmp_path / "results")
    assert outcome == SweepOutcome(failed=1)
    assert "not yet" in shown
    log = tmp_path / "results" / "logs" / f"{edited.id}.log"
    assert log.exists()
    assert sweep([edited], tmp_path / "results")[0] == SweepOutcome(failed=1, skipped=1)
    model.write_text(good.format("return GPT(GPTShape(1, 16, 1), sequence)"))
    assert sweep([edited], tmp_path / "results")[0] == SweepOutcome(ok=1)
    assert not log.exists()


def test_an_edit_during_a_run_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import sources anew, so that a trial after an edit would not be what its record says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "edited_helper.py").write_text("WIDTH = 16\n")
    (tmp_path / "edits_itself.py").write_text(
        "from pathlib import Path\nimport edited_helper\n"
        "from harness.workloads.models import GPT, GPTShape\n"
        "def build(sequence):\n    file = Path(edited_helper.__file__)\n"
        "    file.write_text(file.read_text() + '# more')\n"
        "    return GPT(GPTShape(1, edited_helper.WIDTH, 1), sequence)\n"
    )
    edited = trial("single", model={"name": "edits_itself:build"})
    with pytest.raises(Refusal, match="module 'edited_helper' was edited during this run, so trial"):
        sweep([edited], tmp_path / "results")
    assert not read_all(tmp_path / "results")


def passing(sequence: int, left: str) -> Any:
    """Return a model whose process dies and removes a letter from a file, until the file has none."""
    letters = Path(left).read_text(encoding="utf-8")
    Path(left).write_text(letters[1:], encoding="utf-8")
    return diverging(sequence) if letters else GPT(GPTShape(1, 16, 1), sequence)


@pytest.mark.parametrize(("answer", "kinds", "ok"), [("retry 2", ["killed", "killed"], 2), ("stop", [], 0)])
def test_suites_say_what_follows_a_failure(tmp_path: Path, answer: str, kinds: list[str], ok: int) -> None:
    """A trial whose rank is killed twice is run a third time, and its record has both failures; or the run stops
    there, and the next run continues.
    """
    left = tmp_path / "left"
    left.write_text("xxx", encoding="utf-8")  # the first for the forecast, which builds it too
    model = {"name": f"{__name__}:passing", "arguments": {"left": str(left)}}
    trials = [trial("single", model=model), trial("single")]
    outcome, shown = sweep(trials, tmp_path / "r", suite_with(killed=answer))
    assert outcome == SweepOutcome(ok=ok, failed=2 - ok - (answer == "stop"), skipped=0)
    record = read(tmp_path / "r" / f"{trials[0].id}.json")
    assert [failure.kind for failure in record.earlier] == kinds
    if answer == "stop":
        assert "on_failure.killed stops the run; 1 of 2 trials are done" in shown
    else:
        assert "tried again (2 of 2)" in shown


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A second sweep into the same folder is refused in one line, and changes nothing."""
    with locked(tmp_path), pytest.raises(RecordError, match="another zeropp run is writing there"):
        sweep([trial("single")], tmp_path)
    assert not read_all(tmp_path)


@pytest.mark.parametrize(
    ("cluster", "hosts", "message"),
    [
        (SHAPED, "aa", "link = 'shaped' is not possible here (nodes 0 and 1 are one host)"),
        (ADAPTERS | {"hcas": 2}, "aa", "link = 'real' is not possible here (nodes 0 and 1 are one host)"),
        (ADAPTERS | {"hcas": 4}, "ab", "cluster.hcas = 4: node 1 has these InfiniBand or RoCE adapters"),
        (
            ADAPTERS | {"hcas": ["mlx5_3"]},
            "ab",
            "cluster.hcas = mlx5_3: node 1 has these InfiniBand or RoCE adapters",
        ),
    ],
)
def test_unfit_nodes_are_refused(tmp_path: Path, cluster: dict[str, Any], hosts: str, message: str) -> None:
    """They are refused before any rank starts: nodes on one host have no interface between them, others lack the
    adapters.
    """
    adapters = [[f"mlx5_{number}" for number in range(count)] for count in (4, 2)]
    facts = run_environment.identity()
    nodes = [
        Node(Port("eth0", f"10.0.0.{number}"), host, facts | {"hcas": adapters[number]})
        for number, host in enumerate(hosts)
    ]
    refused = small("stdlib", "zero3", cluster={"launcher": "torchrun", **cluster})
    silent = Nodes(None, nodes)  # type: ignore[arg-type]  # without a channel to them
    sweep([refused], tmp_path, nodes=silent)
    failure = read(tmp_path / f"{refused.id}.json").failure
    assert failure.kind == "link"
    assert message in failure.message


@pytest.mark.long
def test_a_link_that_was_too_slow_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt calibrates the link anew, since a disturbance may be over."""
    calibrated = []

    def check(self: Link) -> None:
        calibrated.append(self.calibrated_mbit)
        if len(calibrated) == 1:
            raise LinkError("carries 43 of 50 Mbit/s")

    monkeypatch.setattr(Link, "check", check)
    paced = trial("zero3", kind="paced", rate="200 Mbit/s")
    assert sweep([paced], tmp_path, suite_with(link="retry 2"))[0] == SweepOutcome(ok=1)
    assert len(calibrated) == 2
    (failure,) = read(tmp_path / f"{paced.id}.json").earlier
    assert failure.message == "carries 43 of 50 Mbit/s"


@pytest.mark.long
@pytest.mark.needs("namespaces")
def test_a_shaped_sweep_calibrates_each_setting_once(tmp_path: Path) -> None:
    """Trials at one rate share a link and its calibration; each trial is probed and counted by itself."""
    trials = [
        trial(strategy, kind="namespaces", rate=rate)
        for rate in ("100 Mbit/s", "200 Mbit/s")
        for strategy in ("ddp", "zeropp")
    ]
    outcome, _ = sweep(trials, tmp_path)
    assert outcome.ok == 4
    records = read_all(tmp_path)
    links = [record.link for record in records if record.link is not None]
    assert [link.requested_mbit for link in links] == [100, 100, 200, 200]
    assert links[0].calibrated_mbit == links[1].calibrated_mbit
    assert links[1].calibrated_mbit != links[2].calibrated_mbit
    assert len({tuple(link.probed_mbit) for link in links}) == 4
    assert all(len(record.interfaces or []) == 2 for record in records)
    assert links[0].details["queue"] == "tbf"


@pytest.mark.long
@pytest.mark.needs("namespaces")
def test_nothing_is_left_of_a_sweep_that_was_ended(tmp_path: Path) -> None:
    """A sweep that Ctrl-C ends leaves no process, namespace or shared memory; the current trial is recorded as
    interrupted, and is run the next time.
    """
    endless = trial("zeropp", kind="namespaces", rate="100 Mbit/s", steps=100_000)
    code = f"""
import json
from pathlib import Path
from rich.console import Console
from harness.runs.further_repeats import Batch
from harness.runs.sweep import run_sweep
from harness.suites.suite import Suite
from harness.suites.trial import Trial
trial = Trial.from_canonical(json.loads({endless.model_dump_json()!r}))
suite = Suite(name="test", question="?")
run_sweep(suite, [Batch(0, (trial,))], Path({str(tmp_path)!r}) / "results", Console())
"""
    shared = set(os.listdir("/dev/shm"))  # noqa: S108, PTH208
    host = namespaces_of([psutil.Process()])
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        try:
            sweeping = psutil.Process(parent.pid)
            # the keeper with two holders, the fork server with two ranks, and the resource tracker
            until(lambda: len(sweeping.children(recursive=True)) >= 7)
            until(lambda: len(namespaces_of(sweeping.children(recursive=True)) - host) >= 3)
            time.sleep(0.5)
            below = sweeping.children(recursive=True)
            made = namespaces_of(below) - host
            assert len(made) == 3
        finally:
            os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
        shown = parent.stdout.read()
    until(lambda: not any(process.is_running() for process in below))
    until(lambda: not made & namespaces_of(psutil.process_iter()))
    left = set(os.listdir("/dev/shm")) - shared  # noqa: S108, PTH208
    assert not {name for name in left if "zeropp" in name or "torch" in name}
    assert "run the same command again to continue" in shown
    record = read(tmp_path / "results" / f"{endless.id}.json")
    assert record.failure.kind == "interrupted"
    assert not finished(tmp_path / "results", endless, record.pool)


def namespaces_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the network namespaces of processes that have not ended."""
    namespaces = set()
    for process in processes:
        with contextlib.suppress(OSError):
            namespaces.add(str(Path(f"/proc/{process.pid}/ns/net").readlink()))
    return namespaces
