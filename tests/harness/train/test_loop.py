"""``zeropp train`` accepts the tutorials' launch lines, refuses what does not fit, and logs a line a step."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.cli import main
from harness.runs.feasibility import forecast, this_host
from harness.suites.trial import Model, Trial
from harness.train import command as train_command
from harness.train import loop
from harness.train.loop import Job
from impl.checkpoint.commit import CheckpointError
from impl.checkpoint.save_load import save
from impl.comm.mesh import Mesh
from impl.engine.masters import LossScaleError
from impl.errors import ZeroError
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.impl.deepspeed.test_config_to_policy import SNIPPETS
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import model

ROOT = Path(__file__).parents[3]
TOY = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "32"]
LINE = re.compile(
    r"step \d+/[24] \| loss ([\d.]+) \| [\d.]+ ms \(forward [\d.]+, backward [\d.]+, optimizer [\d.]+\) "
    r"\| [\d.]+ samples/s \| [\d.e-]+ TFLOP/s per rank \| process peak [\d.]+ MB"
)
STEP = re.compile(r"loss ([\d.]+)")


def config(folder: Path, snippet: str) -> str:
    """Return the path of a file with a configuration of DeepSpeed's tutorials, or with this text."""
    file = folder / "ds.config"
    text = json.dumps({"zero_optimization": SNIPPETS[snippet]}) if snippet in SNIPPETS else snippet
    file.write_text(text, encoding="utf-8")
    return str(file)


def losses(text: str) -> list[float]:
    return list(map(float, LINE.findall(text)))


def output(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """Run the command, which must succeed, and return what it prints."""
    assert main(["train", *flags]) == 0
    return capfd.readouterr().out


def refusal(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["train", *flags]) == 2
    text = capfd.readouterr().err
    assert text.count("\n") == 1
    return text


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Three steps equal one step, a checkpoint and two more; on other ranks, the log says what was not restored."""
    folder = str(tmp_path / "checkpoints")
    base = [*TOY, "--batch-size", "1", "--zero-stage", "3", "--ranks-per-node", "2"]
    whole = STEP.findall(output(capfd, *base, "--steps", "3"))
    first = output(capfd, *base, "--steps", "1", "--save", folder)
    assert "saved " in first
    then = output(capfd, *base, "--steps", "3", "--load", folder, "--save", folder, "--keep", "1")
    assert "continues after step 1" in then
    assert STEP.findall(first) + STEP.findall(then) == whole
    assert [path.name for path in Path(folder).iterdir()] == ["checkpoint-000002"]
    other = [*TOY, "--batch-size", "1", "--zero-stage", "1", "--ranks-per-node", "3", "--steps", "4"]
    assert "continues after step 3\nnot restored: " in output(capfd, *other, "--load", folder)


def test_what_cannot_be_gone_on_from_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A missing checkpoint, no steps left, another seed, and no folder to save in are refused in one line each."""
    folder = str(tmp_path / "checkpoints")
    base = [*TOY, "--batch-size", "1", "--ranks-per-node", "1"]
    assert "no such folder" in refusal(capfd, *base, "--load", folder)
    output(capfd, *base, "--steps", "1", "--save", folder)
    assert "the checkpoint was saved after step 1, so --steps 1 leaves no step to run" in refusal(
        capfd, *base, "--load", folder, "--steps", "1"
    )
    assert "with --seed 0, and this run has --seed 3: give the same --seed, or load another" in refusal(
        capfd, *base, "--load", folder, "--seed", "3"
    )
    assert "--save-every needs a folder for checkpoints" in refusal(capfd, *base, "--save-every", "1")


def test_a_checkpoint_of_another_run_is_refused_by_the_flags_that_differ(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The text, the length of sequences, the model and the optimizer; before that a checkpoint without a run."""
    folder, text = tmp_path / "checkpoints", tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500, encoding="utf-8")
    base = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--batch-size", "1"]
    base += ["--ranks-per-node", "1", "--steps", "2"]
    usual = [*base, "--seq-length", "32", "--corpus", str(text)]
    output(capfd, *usual, "--save", str(folder))
    adam = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    own = tmp_path / "own"
    on_threads(Topology(1, 1), _saved, own)
    (path,), (of_own,) = folder.iterdir(), own.iterdir()
    sequence = (
        "comes from a run with --seq-length 32, and this run has --seq-length 16: give the same --seq-length, or load "
        "another checkpoint"
    )
    corpus = (
        r"comes from a run with --corpus \(SHA-256 [0-9a-f]{12}\), and this run has --corpus \(SHA-256 [0-9a-f]{12}\): "
        "give the same --corpus, or load another checkpoint"
    )
    layers = (
        r"the model and the checkpoint have different entries of the state dict \(differences: \d+\), for example \S+, "
        r"which is only in the model: load the checkpoint with the model that was saved \(--preset, --num-layers, "
        r"--hidden-size and --vocab-size choose this run's model\)"
    )
    optimizer = (
        "has the state of AdamW, and this run's optimizer is Adam: set optimizer.type and optimizer.params.adam_w_mode "
        "in the --deepspeed_config as in the saved run"
    )
    for message, flags in {
        sequence: [*base, "--seq-length", "16", "--corpus", str(text)],
        corpus: [*base, "--seq-length", "32"],
        layers: [*usual, "--num-layers", "3"],
        optimizer: [*usual, "--deepspeed_config", config(tmp_path, json.dumps(adam))],
    }.items():
        line = refusal(capfd, *flags, "--load", str(folder))
        whole = rf"zeropp: rank 0: {re.escape(str(path))}: {message} \(log: \S+\)\n"
        assert re.fullmatch(whole, line), line
    assert refusal(capfd, *usual, "--load", str(own)).startswith(
        f"zeropp: rank 0: {of_own}: was not saved by zeropp train, so the batches of its run are not known: give "
        "--load a checkpoint that zeropp train has saved "
    )


def _saved(mesh: Mesh, folder: Path) -> None:
    """Save a checkpoint as a program of a user's own does."""
    zero = shard(model(), mesh=mesh, policy=preset("zero3", memory=ROOMY))
    save(folder, zero, [torch.optim.AdamW(zero.param_groups())])


def test_where_checkpoints_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is started for a folder that cannot be written or has no checkpoint, or without a corpus."""
    monkeypatch.setattr(train_command, "_run", _never)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nope")):
        assert f"--save {place}: cannot be written: " in refusal(capfd, *TOY, "--save", str(place))
    assert "corpus 'nothere': no such file" in refusal(capfd, *TOY, "--corpus", "nothere")
    assert refusal(capfd, *TOY, "--lr", "1e308").endswith(
        " lr = 1e+308: expected an absolute value less than 1000\n"
    )
    assert "no such folder" in refusal(capfd, *TOY, "--load", str(tmp_path / "none"))
    assert "no checkpoint in it" in refusal(capfd, *TOY, "--load", str(tmp_path))


def test_a_module_larger_than_may_be_live_is_gathered_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in DeepSpeed, the largest matrix is gathered whole; the output says so, and losses are those without a
    limit.
    """
    trained = []
    for most in (3000, 10**9):
        keys = {"stage": 3, "stage3_max_live_parameters": most, "stage3_param_persistence_threshold": 0}
        file = tmp_path / f"{most}.config"
        file.write_text(json.dumps({"zero_optimization": keys}), encoding="utf-8")
        text = output(capfd, *TOY, "--max-padding", "9", "--steps", "2", "--deepspeed_config", str(file))
        said = rf"_live_parameters = {most}: changed: unit '\S+' cannot be cut, so its [\d,]+ elements are gathered"
        assert bool(re.search(said, text)) == (most == 3000)
        trained.append(losses(text))
    assert len(trained[0]) == 2
    assert trained[0] == pytest.approx(trained[1], abs=2e-6)


def _never(job: object) -> None:
    raise AssertionError(job)


def test_a_run_goes_on_with_the_learning_rate_that_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resumed run uses the options of its flags and configuration, not the checkpoint's, and logs what differs."""
    folder = str(tmp_path / "checkpoints")
    base = [*TOY, "--batch-size", "1", "--ranks-per-node", "1", "--save", folder]
    output(capfd, *base, "--lr", "0.001", "--steps", "1")
    resumed = output(capfd, *base, "--lr", "0.0", "--steps", "3", "--load", folder)
    assert "\nchanged for this run: lr = 0.0, not the checkpoint's 0.001\n" in resumed
    weights = []
    for path in sorted(Path(folder).iterdir()):
        assert main(["export", str(path), str(tmp_path / path.name)]) == 0
        weights.append((tmp_path / path.name).read_bytes())
    assert len(weights) == 2
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("optimizer", "flags", "lr"),
    [
        (None, [], 3e-4),
        (None, ["--lr", "0.5"], 0.5),
        ({"type": "AdamW"}, [], 1e-3),
        ({"type": "AdamW", "params": {"lr": 0.5}}, ["--lr", "0.5"], 0.5),
        ({"type": "AdamW", "params": {"lr": "auto"}}, [], 3e-4),
        ({"type": "AdamW", "params": {"lr": "auto"}}, ["--lr", "0.5"], 0.5),
    ],
)
def test_the_learning_rate_is_the_flag_s_or_the_configuration_s(
    optimizer: object, flags: list[str], lr: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it is DeepSpeed's default if an optimizer is named, else 3e-4, which "auto" means too."""
    jobs: list[Job] = []
    monkeypatch.setattr(train_command, "_run", jobs.append)
    file = config(tmp_path, json.dumps({} if optimizer is None else {"optimizer": optimizer}))
    assert main(["train", *TOY, "--deepspeed-config", file, *flags]) == 0
    assert jobs[0].trial.optimizer.arguments["lr"] == lr


def test_padding_is_refused_with_the_option_that_allows_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A unit with 19.8 % of padding is refused below that limit, and trained with the option that the refusal
    names.
    """
    keys = {"stage": 3, "zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}
    small = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--steps", "1"]
    flags = [*small, "--deepspeed-config", config(tmp_path, json.dumps({"zero_optimization": keys}))]
    message = refusal(capfd, *flags, "--max-padding", "0.19")
    assert re.search(r"\d% of the \d+ elements of parameters, and max_padding allows 19.0%", message)
    needed = message.rpartition(" ")[2].strip()
    assert message.endswith(f"raise max_padding to {needed}, with --max-padding {needed}\n")
    assert "'--max-padding'" in refusal(capfd, *flags, "--max-padding", "nan")
    assert "step 1/1 | loss " in output(capfd, *flags, "--max-padding", needed)


def test_as_many_ranks_as_torchrun_started_are_asked_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of nodes and ranks that do not agree with torchrun's are refused in one line."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun set WORLD_SIZE to 2, but --nodes x" in refusal(capfd, *TOY, "--nodes", "3")


@pytest.mark.parametrize("error", [LossScaleError("too small"), ZeroError("odd"), CheckpointError("gone")])
def test_what_a_rank_of_torchrun_refuses_is_one_line(
    error: Exception, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rank is this process, errors of training end it with status 2, not a traceback."""
    monkeypatch.setattr(loop, "_Training", mock.Mock(side_effect=error))
    monkeypatch.setattr(train_command, "run_in_place", lambda train, job, *_: train(mock.Mock(), job))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    assert refusal(capfd, *TOY) == f"zeropp: {error}\n"


_STUCK = """
import sys, time
import torch
import torch.distributed as dist
from harness import cli
from harness.train import loop
from harness.errors import Refusal

def stuck(rank, job):
    if rank.rank == 1:
        time.sleep(600)
    loop.under_way = dist.all_reduce(torch.ones(1), async_op=True)
    raise Refusal("rank 0 cannot go on")

loop.train = stuck
sys.exit(cli.main())
"""


@pytest.mark.long
def test_a_rank_of_torchrun_that_fails_waits_for_nobody() -> None:
    """It ends with its line and status 2, though a message to a rank that no longer answers is under way."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launched = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    failing, silent = (
        subprocess.Popen(
            [sys.executable, "-c", _STUCK, "train", *TOY],
            cwd=ROOT,
            env={**os.environ, **launched, **meeting, "RANK": rank, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    )
    try:
        _, stderr = failing.communicate(timeout=120)
        assert silent.poll() is None
    finally:
        for process in (failing, silent):
            process.kill()
            process.communicate()
    assert (failing.returncode, stderr) == (2, "zeropp: rank 0 cannot go on\n")


def test_zero_tutorial_story(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For 1.5 B parameters, 18 GB of Adam's states become an eighth on 8 ranks; --plan computes this without
    building the model.
    """
    file = config(tmp_path, "zero_tutorial stage 1")
    shape = ["--num-layers", "48", "--hidden-size", "1600", "--num-attention-heads", "16"]
    flags = [*shape, "--batch-size", "1", "--deepspeed_config", file, "--ranks-per-node", "8", "--plan"]
    match = re.search(r"states are ([\d.]+) GB, and ([\d.]+) GB on each rank", output(capfd, *flags))
    assert match is not None
    whole, share = float(match[1]), float(match[2])
    assert whole == pytest.approx(18, rel=0.05)
    assert share == pytest.approx(whole / 8, rel=0.01)


def test_offloaded_states_have_rows_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With offloading each stage has rows for device and host, whose sum is Adam's states without offloading."""
    keys: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    outputs = []
    for offload in ({}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}):
        file = config(tmp_path, json.dumps({"zero_optimization": keys | offload}))
        flags = ["--preset", "1.5b", "--ranks-per-node", "8", "--batch-size", "1", "--plan"]
        outputs.append(output(capfd, *flags, "--deepspeed-config", file))
    plain, half = outputs
    ((adam, *_),) = rows(plain, r"3 <")
    assert " host " not in plain
    held = []
    for place in ("device", "host"):
        ((states, *others, last),) = rows(half, rf"3 < +{place}")
        held.append(states)
        assert states + sum(others) == pytest.approx(last, abs=4e-3)
    assert min(held) > 0.4 * adam
    assert sum(held) == pytest.approx(adam, abs=2e-3)
    assert "in addition to those on the device. On a CPU both are in the same memory" in half
    states_of = re.compile(r"Adam's states are [\d.]+ GB, and [\d.]+ GB")
    assert states_of.findall(half) == states_of.findall(plain)


def test_a_plan_has_the_bytes_between_nodes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For each stage, --plan prints the bytes that a suite's plan predicts; on one node it prints none."""
    table = json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
    flags = [*TOY, "--deepspeed-config", config(tmp_path, table), "--plan", "--nodes"]
    assert "between nodes" not in output(capfd, *flags, "1")
    lines = output(capfd, *flags, "2").splitlines()
    (line,) = [line for line in lines if line.startswith("All ranks together send between nodes")]
    model = Model(name="gpt-tiny")
    recipe = Trial(strategy="recipe", deepspeed_config=table, model=model, sequence=32, tokens_per_rank=32)
    (same,) = forecast([recipe], this_host())
    assert same.inter is not None
    assert line.endswith(f", {same.inter / 1e6:.4g} MB at stage 3.")


def rows(text: str, head: str) -> list[list[float]]:
    """Return the numbers of the table's rows that begin with ``head``."""
    lines = re.findall(rf"^ *{head} +(\d.*)$", text, re.MULTILINE)
    return [[float(cell) for cell in line.split()] for line in lines]


@pytest.mark.parametrize("preset_name", ["10b", "18b"])
def test_too_large_a_shape_is_refused_with_its_numbers(
    preset_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model that does not fit is refused before anything is allocated, with a table of all stages."""
    assert main(["train", "--preset", preset_name, "--zero-stage", "0", "--ranks-per-node", "64"]) == 2
    captured = capfd.readouterr()
    assert re.search(
        r"too big for memory: 64 of 64 ranks run on this machine, and each needs [\d.]+ GB at stage 0",
        captured.err,
    )
    assert all(re.search(rf"^ +{stage}( <)? ", captured.out, re.MULTILINE) for stage in range(4))


@pytest.mark.parametrize(
    ("table", "flags", "message"),
    [
        (
            None,
            ["--tensor-model-parallel-size", "2"],
            "-size 2: there is no tensor, model or pipeline",
        ),
        (None, ["--fp16", "--bf16"], "fp16.enabled = true: contradicts bf16.enabled = true"),
        (None, ["--hidden-size", "65"], "a width of 65 is not divisible by 4 heads"),
        (None, ["--deepspeed_config", "none.json"], "none.json: cannot be read"),
        (None, ["--zero-stage", "7"], "zero-stage"),
        (None, ["--steps", "1" + "0" * 30], "--steps"),
        (None, ["--hidden-size", "1000000000", "--plan"], "--hidden-size"),
        (
            {"zero_optimization": {"stage": 2}},
            ["--zero-stage", "3"],
            "--zero-stage 3 contradicts .* stage = 2",
        ),
        ({"train_micro_batch_size_per_gpu": 4}, ["--batch-size", "2"], "--batch-size 2 contradicts .* = 4"),
        ({"train_batch_size": 3}, [], "train_batch_size = 3"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 2}}},
            ["--lr", "0.5"],
            "--lr 0.5 contradicts .*lr = 2",
        ),
    ],
)
def test_flags_that_cannot_be_are_refused(
    table: object, flags: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Impossible flags, and flags that contradict the configuration, are refused in one line."""
    both = [] if table is None else [*TOY, "--deepspeed-config", config(tmp_path, json.dumps(table))]
    assert re.search(message, refusal(capfd, *both, *flags))


@pytest.mark.parametrize(
    "text", ["[1, 2]", "{", '{"a": 1, "a": 2}', "\0", '{"zero_optimization": {"stage": 9}}']
)
def test_a_wrong_configuration_is_named_once(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that is not JSON, not a table, or has impossible values is named once in the refusal."""
    assert refusal(capfd, "--deepspeed-config", config(tmp_path, text)).count("ds.config") == 1


@pytest.mark.long
def test_torchrun_starts_its_ranks(tmp_path: Path) -> None:
    """Under torchrun each process is a rank, and rank 0 alone prints; a process of torchrun takes seconds."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python",
        sys.executable, "-m", "harness.cli", "train", *TOY, "--steps", "2", "--zero-stage", "3",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 2
