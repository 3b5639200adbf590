"""``python -m harness.gpu_campaign``: all that a GPU is needed for, in stages, with one table last.

For a machine that is there for minutes and has no network: each stage is a command of its own under a time
limit, what it found lies on disk before the next begins, and one that fails is a line of the table.
``--device cpu`` rehearses the same commands with tiny sizes; ``--missing`` names packages to bring along.

This file imports the standard library alone, so that it can say what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Distributions whose modules the stages import, by the module's name.
NEEDED: Final = {
    "torch": "torch", "cupy": "cupy-cuda13x", "numpy": "numpy", "pydantic": "pydantic",
    "pydantic_core": "pydantic-core", "typing_inspection": "typing-inspection",
    "annotated_types": "annotated-types", "typer": "typer", "click": "click", "rich": "rich",
    "markdown_it": "markdown-it-py", "mdurl": "mdurl", "pygments": "pygments", "psutil": "psutil",
    "pyroute2": "pyroute2", "safetensors": "safetensors", "scipy": "scipy", "pandas": "pandas",
    "seaborn": "seaborn", "matplotlib": "matplotlib", "jinja2": "jinja2", "filelock": "filelock",
    "pynvml": "nvidia-ml-py", "hypothesis": "hypothesis", "sortedcontainers": "sortedcontainers",
    "pytest": "pytest", "pytest_benchmark": "pytest-benchmark", "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist", "execnet": "execnet",
}  # fmt: skip
_TAIL_LINES: Final = 30  # of a stage's output, printed when it ends
_FOUND_LETTERS: Final = 90  # of its last line, in the table
_REPOSITORY: Final = Path(__file__).resolve().parents[1]

_SUITE: Final = """\
name = "{name}"
question = "{question}"

[defaults]
model.name = "{model}"
sequence = {sequence}
tokens_per_rank = {tokens}
steps = {steps}
warmup = 2
validate_every = 0
validation_batches = 1
{more}

[defaults.cluster]
nodes = {nodes}
ranks_per_node = {nodes}
device = "{device}"
transport = "{transport}"
link = "{link}"

[matrix]
strategy = {strategies}
{axis}
"""
_HOOKS: Final = "What do our hooks cost on one rank, beside plain PyTorch and FSDP2, in time and in memory?"
_SHARED: Final = "What does each part of ZeRO++ bring to 2x2 ranks that share a GPU, at three rates?"
_PAIR: Final = "Does ZeRO++ learn on a GPU what ZeRO-3 learns?"
_HUNDRED: Final = "model.arguments = { layers = 12, width = 768, heads = 12 }"  # million parameters, in bf16
_PADDED: Final = "policy.max_padding = 0.3"  # a tiny model's
_PARTS: Final = ("zero3", "qwz", "hpz", "qgz", "zeropp")


@dataclass(frozen=True, slots=True)
class Asked:
    """A suite that a stage runs.

    Attributes:
        letter: of its stage.
        strategies: that it compares.
        more: what its defaults say besides, on a CPU and on a GPU.
        sizes: model, sequence, tokens and steps on a GPU.
        nodes: as many as ranks on each; more than one share the GPU.
        axis: of its matrix.
    """

    letter: str
    name: str
    question: str
    strategies: tuple[str, ...]
    more: tuple[str, str]
    sizes: tuple[str, int, int, int]
    nodes: int = 1
    axis: str = ""


_LARGE: Final = ("gpt-1.5b", 1024, 4096, 12)
_BF16: Final = 'peer.compute = "bf16"\nactivation_checkpointing = true'
_SUITES: Final = (
    Asked("c", "engine", _HOOKS, ("single", "fsdp2", "zero3", "zeropp"), ("", _BF16), _LARGE),
    Asked("c", "offload", _HOOKS, ("zero3",), ("policy.offload_optimizer = 1.0",) * 2, _LARGE),
    Asked("c", "fp16", _HOOKS, ("zero3",),
          ('policy = { compute = "fp16", loss_scale = "dynamic" }',) * 2, _LARGE),
    Asked("d", "shared", _SHARED, _PARTS, (_PADDED, _HUNDRED), ("gpt-medium", 512, 2048, 6), 2,
          'cluster.rate = ["1 Gbit/s", "4 Gbit/s", "10 Gbit/s"]'),
    Asked("e", "pair", _PAIR, ("zero3", "zeropp"), (_PADDED, "optimizer.schedule.warmup = 20"),
          ("gpt-medium", 256, 2048, 300), 2),
)  # fmt: skip
_TINY: Final = ("gpt-tiny", 16, 32, 3)  # on a CPU


@dataclass(frozen=True, slots=True)
class Stage:
    """One command.

    Attributes:
        name: its letter, and what it is.
        command: its words after the interpreter.
        seconds: at most.
        needs: modules without which it is left out.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """A stage's line in the table."""

    name: str
    status: str
    seconds: float
    found: str


def missing() -> list[str]:
    """Distributions of :data:`NEEDED` whose modules are not here."""
    return [named for module, named in NEEDED.items() if importlib.util.find_spec(module) is None]


def stages(device: str, results: Path) -> Iterator[Stage]:
    """All stages, correctness first; writes the suites that they run."""
    gpu, cli = device == "cuda", ("-m", "harness.cli")
    few = () if gpu else ("--codec", "int4:32", "--examples", "2", "--elements", "2000")
    yield Stage("a laws", (*cli, "check", "codecs", "--backend", device, *few), 150)
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu" if gpu else "not nightly")
    some = (
        "tests/impl/cuda", "tests/harness/laws/test_laws.py", "tests/impl/unit/test_host_memory.py",
        "tests/impl/transport/test_staging.py",
    )  # fmt: skip
    chosen = some if gpu else ("tests/impl/cuda/test_arithmetic.py", "-k", "bf16")
    yield Stage("a tests", (*tests, *chosen), 180, ("pytest", "hypothesis"))
    for mebibytes in (256, 1, 16, 1024) if gpu else (1,):
        size = ("--megabytes", str(mebibytes), "--results", str(results / f"{mebibytes}-MiB"))
        short = ("--seconds", "0.3") if gpu else ("--seconds", "0.01", "--codec", "int4:32")
        backends = ("--backend", device)
        yield Stage(f"b {mebibytes} MiB", (*cli, "bench", "codecs", *backends, *size, *short), 100)
    for other in ("torchao", "bitsandbytes") if gpu else ():
        command = (*cli, "bench", "codecs", "--backend", "cuda", "--backend", other)
        yield Stage(f"b {other}", (*command, "--results", str(results / other)), 60, (other,))
    for asked in _SUITES:
        suite = results / f"{asked.name}.toml"
        suite.write_text(_text(asked, device), encoding="utf-8")
        yield Stage(f"{asked.letter} {asked.name}", (*cli, "run", str(suite), "--results", str(results)), 240)


def _text(asked: Asked, device: str) -> str:
    """The suite's file."""
    gpu, shares = device == "cuda", asked.nodes > 1
    model, sequence, tokens, steps = asked.sizes if gpu else _TINY
    return _SUITE.format(
        name=asked.name,
        question=asked.question,
        model=model,
        sequence=sequence,
        tokens=tokens,
        steps=steps,
        more=asked.more[gpu],
        nodes=asked.nodes,
        device=device,
        transport=("staged" if shares else "nccl") if gpu else "gloo",
        link="paced" if asked.axis else "none",
        strategies=str(list(asked.strategies)).replace("'", '"'),
        axis=asked.axis,
    )


def run(stage: Stage, log: Path, seconds: float) -> Ended:
    """Run a stage for at most ``seconds``; its output goes into ``log``, and its end is printed."""
    lacking = [module for module in stage.needs if importlib.util.find_spec(module) is None]
    if lacking:
        return Ended(stage.name, "left out", 0.0, f"no {', '.join(lacking)}")
    if seconds < 1:
        return Ended(stage.name, "left out", 0.0, "no time was left")
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *stage.command],
            cwd=_REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all that it started ends with it
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        try:
            status = process.wait(seconds)
            told = "ok" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            told = f"cut at {seconds:.0f} s"
        finally:
            _end(process)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    print(f"== {stage.name}: {told}", *lines[-_TAIL_LINES:], sep="\n", flush=True)
    found = lines[-1].strip()[:_FOUND_LETTERS] if lines else ""
    return Ended(stage.name, told, time.monotonic() - begun, found)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a stage."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def table(ended: Sequence[Ended]) -> str:
    """The lines that are printed last."""
    rows = [
        ("stage", "status", "s", "last line"),
        *((e.name, e.status, f"{e.seconds:.0f}", e.found) for e in ended),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 if all that ran were ok."""
    parser = argparse.ArgumentParser(prog="python -m harness.gpu_campaign", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=Path("results/gpu"), help="folder of records, logs")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all stages together")
    parser.add_argument("--stages", default="abcde", help="letters of those to run")
    parser.add_argument("--missing", action="store_true", help="print packages that are not here")
    asked = parser.parse_args(arguments)
    if asked.missing:
        print("\n".join(missing()))
        return 0
    results = asked.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    ends, ended = time.monotonic() + 60 * asked.minutes, []
    for number, stage in enumerate(stages(asked.device, results)):
        if stage.name[0] in asked.stages:
            log = results / f"{number}-{stage.name.replace(' ', '-')}.log"
            ended.append(run(stage, log, min(stage.seconds, ends - time.monotonic())))
            (results / "campaign.txt").write_text(table(ended) + "\n", encoding="utf-8")
    print(table(ended))
    return int(any(one.status not in ("ok", "left out") for one in ended))


if __name__ == "__main__":
    sys.exit(main())
