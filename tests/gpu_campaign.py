"""``python -m tests.gpu_campaign``: everything that needs a GPU, in stages, with a table at the end.

For a machine without a network, lent for minutes: each stage is a command under a time limit, its results
are on disk before the next begins, and a failure is a line of the table.  After each stage one file,
:data:`ARCHIVE`, holds all results, to be brought back.
``--device cpu`` rehearses the same commands with tiny sizes, and ``--tiny`` does so on a GPU; ``--missing`` names
packages to bring along.

This file imports only the standard library, so that it can name missing packages.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ARCHIVE: Final = "gpu-campaign.tar.gz"
_DRAWN: Final = {"figures", "tables", "report.html"}  # not brought back: they can be drawn from records
_REPOSITORY: Final = Path(__file__).resolve().parents[1]

_ONE: Final = {  # rank, of a GPU to itself
    "model.name": "gpt-1.5b", "sequence": 1024, "tokens_per_rank": 4096, "steps": 12,
    "policy.compute": "bf16", "activation_checkpointing": True, "cluster.nodes": 1,
    "cluster.ranks_per_node": 1, "cluster.transport": "nccl", "cluster.link": "none",
}  # fmt: skip
_SHARED: Final = {  # by 2x2 ranks
    "model.name": "gpt-medium", "tokens_per_rank": 2048, "policy.compute": "bf16", "cluster.nodes": 2,
    "cluster.ranks_per_node": 2, "cluster.transport": "staged", "cluster.link": "none",
}  # fmt: skip
_TINY: Final = {
    "model.name": "gpt-tiny", "sequence": 16, "tokens_per_rank": 32, "steps": 3, "policy.max_padding": 0.3,
}  # fmt: skip
# Seconds at most, question, configurations and other fields, by stage and name.  Ranks share a GPU without FSDP2:
# NCCL refuses a second rank on it, and over gloo FSDP2 would bypass our wire and its pacer, which holds the
# link to a rate.
_SUITES: Final[dict[str, tuple[float, str, tuple[str, ...], dict[str, object]]]] = {
    "c engine": (
        240, "What do our hooks cost on one rank, beside plain PyTorch and FSDP2, in time and in memory?",
        ("single", "fsdp2", "zero3", "zeropp"), _ONE | {"peer.compute": "bf16"},
    ),
    "c offload": (
        150, "What does an offloaded optimizer free on a GPU, and cost?",
        ("zero3",), _ONE | {"steps": 4, "policy.offload_optimizer": 1.0},
    ),
    "c fp16": (
        100, "Does fp16 with a loss scale train on a GPU?",
        ("zero3",), _ONE | {"policy.compute": "fp16", "policy.loss_scale": "dynamic"},
    ),
    "d shared": (
        320, "What does each part of ZeRO++ bring to 2x2 ranks that share a GPU, at three rates?",
        ("zero3", "qwz", "hpz", "qgz", "zeropp"),
        _SHARED | {
            "model.arguments.layers": 12, "model.arguments.width": 768, "model.arguments.heads": 12,
            "sequence": 512, "steps": 4, "cluster.link": "paced",
            "matrix.cluster.rate": ["1 Gbit/s", "4 Gbit/s", "10 Gbit/s"],
        },
    ),
    "e pair": (
        200, "Does ZeRO++ learn on a GPU what ZeRO-3 learns?",
        ("zero3", "zeropp"), _SHARED | {"sequence": 256, "steps": 300, "optimizer.schedule.warmup": 20},
    ),
}  # fmt: skip
_OTHERS: Final = {  # quantisers, by the module without which they are left out
    "torch.compile": "triton", "torchao": "torchao", "bitsandbytes": "bitsandbytes", "deepspeed": "deepspeed",
}  # fmt: skip
_ABLATED: Final = ("general", "shared-memory", "two-reads", "unfused", "narrow", "few-warps")


@dataclass(frozen=True, slots=True)
class Stage:
    name: str  # its letter and its subject
    command: tuple[str, ...]  # arguments of the interpreter
    seconds: float  # at most
    needs: tuple[str, ...] = ()  # modules without which it is left out


@dataclass(frozen=True, slots=True)
class Ended:
    name: str
    status: str
    seconds: float
    last_line: str


def missing() -> list[str]:
    """Distributions of pyproject.toml, with tests and CUDA 13, that are not installed."""
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["test"] + extras["cuda13"]
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in requirements]
    installed = {re.sub("[_.]", "-", package.name.lower()) for package in importlib.metadata.distributions()}
    return [name for name in names if name not in installed]


def stages(device: str, results: Path, *, tiny: bool = False) -> Iterator[Stage]:
    """All stages, correctness first; writes the suites that they run."""
    gpu = device == "cuda"
    large = gpu and not tiny
    yield from _tests(device, large=large)
    yield from _benches(device, results, large=large)
    for name, (seconds, question, strategies, fields) in _SUITES.items():
        chosen = strategies if large or fields["cluster.nodes"] == 1 else strategies[:1] + strategies[-1:]
        keys = {key: fields[key] for key in fields if large or not key.startswith(("model.", "optimizer."))}
        keys |= {"cluster.device": device, "warmup": 2, "validate_every": 0, "validation_batches": 1}
        keys |= {"matrix.strategy": chosen} | ({} if large else _TINY)
        keys |= {} if gpu else {"cluster.transport": "gloo"}
        suite = results / f"gpu-{name[2:]}.toml"
        head = {"name": suite.stem, "question": question}
        tables = {key if key.startswith("matrix.") else f"defaults.{key}": keys[key] for key in keys}
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in (head | tables).items()]
        suite.write_text("".join(lines), encoding="utf-8")
        command = ("-m", "harness.cli", "run", "--no-report", str(suite), "--results", str(results))
        yield Stage(name, command, seconds if large else 240)


def _tests(device: str, *, large: bool) -> Iterator[Stage]:
    """Laws and bits of every codec and kernel, the tests for a GPU, and the stress of streams."""
    gpu = device == "cuda"
    few = ("--examples", "6") if large else ("--codec", "int4:32", "--examples", "2", "--elements", "2000")
    yield Stage("a laws", ("-m", "harness.cli", "check", "codecs", "--backend", device, *few), 150)
    chosen = "gpu" if gpu else "not gpu and not nightly"
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", chosen)
    kernels = (
        "tests/impl/cuda", "tests/harness/laws/test_laws.py", "tests/impl/unit/test_host_memory.py",
        "tests/impl/transport/test_staging.py",
        "tests/bench/test_cuda_codecs.py::test_large_results_are_the_references", "-n", "8",
    )  # fmt: skip
    short = ("tests/impl/cuda/test_kernels.py", "-k", "kernels_for_all_blocked", "-n", "2")
    needs = ("pytest", "hypothesis", "pytest_timeout", "pytest_benchmark", "xdist")
    yield Stage("a tests", (*pytest, *(kernels if large else short)), 240, needs)
    some = () if large else ("-k", "copies")
    yield Stage("a streams", (*pytest, "tests/impl/engine/test_streams.py", *some), 120, needs)


def _benches(device: str, results: Path, *, large: bool) -> Iterator[Stage]:
    """GB/s of every kernel at several sizes, beside other libraries, and without one optimization each."""
    gpu = device == "cuda"
    bench = ("-m", "harness.cli", "bench", "codecs", "--seconds", "0.3" if large else "0.01")

    def stage(name: str, *options: str, mebibytes: int = 256 if large else 1, needs: str = "torch") -> Stage:
        outputs = ("--results", str(results / name.replace(" ", "-")), "--megabytes", str(mebibytes))
        return Stage(f"b {name}", (*bench, *options, *outputs), 120, (needs,))

    few = () if large else ("--codec", "int4:32")
    for size in (256, 1, 16, 1024) if large else (1,):
        kinds = ("--kind", "fp32", "--kind", "bf16") if size == 256 else ()
        yield stage(f"{size} MiB", "--backend", device, *kinds, *few, mebibytes=size)
    beside = ("--codec", "int8:2048", "--codec", "int8:256", "--codec", "int4:256")
    if large:
        names = (part for name in _ABLATED for part in ("--backend", f"cuda-{name}"))
        yield stage("ablation", "--backend", "cuda", *names, *beside)
    for other, module in _OTHERS.items() if gpu else [("torch.compile", "torch")]:
        kind = "fp16" if other == "deepspeed" else "bf16"
        yield stage(other, "--backend", device, "--backend", other, "--kind", kind, *beside, needs=module)


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
            status_text = "ok" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            status_text = f"cut at {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    shown = lines[-4 if status_text == "ok" else -30 :]
    print(f"== {stage.name}: {status_text}", *shown, sep="\n", flush=True)
    results = [line.strip() for line in lines if not line.endswith(".html")]  # without paths of pages
    return Ended(stage.name, status_text, time.monotonic() - begun, results[-1][:100] if results else "")


def table(ended: Sequence[Ended]) -> str:
    rows = [(stage.name, stage.status, f"{stage.seconds:.0f}", stage.last_line) for stage in ended]
    whole = [("stage", "status", "s", "last line"), *rows]
    return "\n".join("{:20}  {:12}  {:>5}  {}".format(*row).rstrip() for row in whole)


def write_whole(path: Path, text: str) -> None:
    """Write a file by a rename, so that it is always whole."""
    aside = path.with_suffix(".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def pack(results: Path, into: Path) -> Path:
    """Write ``results``, without pages and figures, to ``into/gpu-campaign.tar.gz``."""
    into.mkdir(parents=True, exist_ok=True)
    path = into / ARCHIVE
    aside = path.with_suffix(".part")  # a rename keeps the last archive whole
    with tarfile.open(aside, "w:gz") as archive:
        for file in sorted(results.rglob("*")):
            inside = file.relative_to(results)
            if file.is_file() and file not in (path, aside) and not _DRAWN & set(inside.parts):
                archive.add(file, Path("gpu-campaign", inside))
    return aside.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 if all that ran were ok."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_campaign", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=Path("results/gpu"), help="folder of records, logs")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all stages together")
    parser.add_argument("--stages", default="abcde", help="letters of those to run")
    parser.add_argument("--pack", type=Path, help=f"folder in which {ARCHIVE} is written; default: --results")
    parser.add_argument("--missing", action="store_true", help="print packages that are not here")
    parser.add_argument("--tiny", action="store_true", help="the sizes of a rehearsal, on a GPU too")
    options = parser.parse_args(arguments)
    if options.missing:
        print("\n".join(missing()))
        return 0
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    packed = results if options.pack is None else options.pack.resolve()
    ends, ended = time.monotonic() + 60 * options.minutes, []
    for number, stage in enumerate(stages(options.device, results, tiny=options.tiny)):
        if stage.name[0] in options.stages:
            log = results / f"{number}-{stage.name.replace(' ', '-')}.log"
            letters = "".join(sorted(set(options.stages)))  # of several calls into one folder
            summary = results / f"campaign-{letters}.txt"
            begun = [*ended, Ended(stage.name, "not ended", 0.0, log.name)]
            write_whole(summary, table(begun) + "\n")
            ended.append(run(stage, log, min(stage.seconds, ends - time.monotonic())))
            write_whole(summary, table(ended) + "\n")
            pack(results, packed)
    print(table(ended))
    return int(any(stage.status not in ("ok", "left out") for stage in ended))


if __name__ == "__main__":
    sys.exit(main())
