"""A first suite fits this machine, runs as it is written, and every axis in it can be switched on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tables.suite_keys import fields_of_a_trial
from harness import cli, expected_time, new_suite
from harness.runs.feasibility import Host, any_host, forecast
from harness.suites.suite_file import load
from tests.harness.conftest import Zeropp

GIB = 2**30
HERE = Host(memory=8 * GIB, gpus=(), namespaces=lambda: None)
NO_AXIS = {  # keys that need other keys, limit a run, or are for the whole suite
    "cluster.ranks", "method", "gather_method",
    "workload", "generate.prompt", "generate.tokens", "rlhf.group", "rlhf.kl", "strategy", "peer.compute",
    "peer.reduce_dtype", "peer.group", "peer.bucket_mb", "deepspeed_config",
    "control", "policy.gather", "policy.largest_unit",
    "cluster.link", "cluster.slow", "cluster.inner_rate", "cluster.hcas", "cluster.device",
    "cluster.launcher", "cluster.hosts",
    "cluster.slurm",
    "model.arguments", "corpus", "tokenizer", "optimizer.arguments", "optimizer.schedule.warmup",
    "optimizer.schedule.start", "optimizer.schedule.floor", "steps", "warmup", "validate_every",
    "validation_batches", "timeout_seconds", "measure_quantisation", "repeat", "policy.align",
    "policy.max_padding", "policy.stage", "policy.group", "policy.frozen", "policy.loss_scale",
    "policy.persist_most", "policy.order_every", "policy.differences", "policy.refresh", "policy.planes",
    "policy.owned", "optimizer.matrices", "policy.schedule", "policy.local_steps", "policy.local_fragments",
    "policy.outer_rate", "policy.outer_momentum", "policy.pair_below",
}  # fmt: skip


AXES = re.findall(r"^# (\S+) = \[", new_suite.suite_text("mine", HERE, 512, 8), re.MULTILINE)
OPERATIONS = 6 * 2.5e6 * 512  # of a pass of a small GPT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, on a machine where a pass takes 0.1 s."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(expected_time, "core_flops", lambda: OPERATIONS / 0.1)
    return tmp_path


def test_it_is_written_and_fits_here(folder: Path, zeropp: Zeropp) -> None:
    """The suite has twelve trials, six pairs, which can all run and take at most five minutes by estimate."""
    process = zeropp("new", "mine")
    assert (process.stdout, "Expected here: about" in process.stderr) == ("mine.toml\n", True)
    suite = load(Path("mine.toml"))
    assert (suite.name, len(suite.trials), suite.repeats.least) == ("mine", 12, 6)
    forecasts = forecast(suite.trials, HERE)
    assert not any(planned.problems for planned in forecasts)
    seconds, _ = expected_time.estimate(forecasts)
    assert seconds is not None
    assert seconds <= 300
    assert f"about {expected_time.spoken(seconds)}" in suite.time


def test_a_slow_machine_gets_fewer_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower the machine, the fewer steps and the smaller batches, down to the smallest size."""
    written = []
    for seconds in (0.01, 1.0, 100.0):  # of a pass
        monkeypatch.setattr(expected_time, "core_flops", lambda took=seconds: OPERATIONS / took)
        path, _ = new_suite.write(f"at-{seconds:g}", HERE)
        trial = load(path).trials[0]
        written.append((trial.tokens_per_rank, trial.steps))
    assert written[0] == (512, 8) > written[1] > written[2] == (128, 2)


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_can_be_switched_on(folder: Path, axis: str) -> None:
    """Removing the # before an axis adds it to the matrix, and all combinations can run."""
    text = new_suite.suite_text("mine", HERE, 512, 8)
    line = next(line for line in text.splitlines() if line.startswith(f"# {axis} = "))
    assert len(line) <= 120
    body = text.replace(line, line.removeprefix("# "))
    if "accumulation = 4" in line:
        body = body.replace("warmup = 1\n", "warmup = 1\naccumulation = 4\n")
    Path("mine.toml").write_text(body, encoding="utf-8")
    suite = load(Path("mine.toml"))
    assert len(suite.combinations) > 2
    assert not any(planned.problems for planned in forecast(suite.combinations, any_host()))


def test_every_field_of_a_trial_is_an_axis_or_known_not_to_be() -> None:
    """A new key must be added to the template, or to the keys that are not axes of their own."""
    fields = set(fields_of_a_trial()) | {"optimizer.arguments.lr"}
    assert set(AXES) <= fields
    assert fields - set(AXES) == NO_AXIS


@pytest.mark.parametrize(
    ("host", "lines"),
    [
        (HERE, ["ranks_per_node = 2", 'rate = "50 Mbit/s"']),
        (Host(GIB, (), lambda: None), ["ranks_per_node = 1"]),
        (Host(8 * GIB, (), lambda: "no\nroot"), ['link = "paced"  # network namespaces: no root']),
        (Host(8 * GIB, (80 * GIB,) * 8, lambda: None), ['device = "cuda"', 'transport = "nccl"']),
        (Host(8 * GIB, (80 * GIB,), lambda: None), ["ranks_per_node = 2"]),
    ],
)
def test_the_cluster_is_what_the_machine_has(host: Host, lines: list[str]) -> None:
    """The cluster has as many ranks as memory holds, GPUs if there are four, and a paced link without namespaces."""
    text = new_suite.suite_text("mine", host, 512, 8)
    assert all(f"\n{line}" in text for line in lines)
    assert ("cuda" in text) == (len(host.gpus) >= 4)


def test_an_existing_file_is_not_overwritten(folder: Path, zeropp: Zeropp) -> None:
    """Existing files, and names that a suite cannot have, are refused in one line with status 2."""
    (folder / "mine.toml").write_text("mine", encoding="utf-8")
    for name, message in (
        ("mine", "mine.toml: File exists"),
        ("mine.toml", "mine.toml: File exists"),
        ("a/b", "'a/b': expected at most 100 letters"),
        ("..", "'..': expected"),
        ("", "'': expected"),
        ("x" * 101, "expected at most 100 letters"),
    ):
        stderr = zeropp("new", name, status=cli.REFUSED).stderr
        assert message in stderr
        assert stderr.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["mine.toml"]
    assert (folder / "mine.toml").read_text(encoding="utf-8") == "mine"
