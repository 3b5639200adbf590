"""``python -m tests.gpu_campaign``: all that a GPU is needed for, in stages, with one table last.

For a machine that is there for minutes and has no network: each stage is a command of its own under a time
limit, what it found lies on disk before the next begins, and one that fails is a line of the table.  After
each of them one file, :data:`ARCHIVE`, holds all that was found, to be brought back.
``--device cpu`` rehearses the same commands with tiny sizes; ``--missing`` names packages to bring along.

This file imports the standard library alone, so that it can say what is missing.
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
_DRAWN: Final = {"figures", "tables", "report.html"}  # which are not brought back: records draw them again
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
_TINY: Final = {  # on a CPU
    "model.name": "gpt-tiny", "sequence": 16, "tokens_per_rank": 32, "steps": 3, "policy.max_padding": 0.3,
    "cluster.transport": "gloo",
}  # fmt: skip
# Seconds at most, question, contenders and what else is said, by stage and name.  Ranks share a GPU without
# FSDP2: NCCL refuses a second rank on it, and over gloo FSDP2 would send past our wire, whose pacer alone
# holds the link to a rate.
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
    name: str  # its letter, and what it is
    command: tuple[str, ...]  # its words after the interpreter
    seconds: float  # at most
    needs: tuple[str, ...] = ()  # modules without which it is left out


@dataclass(frozen=True, slots=True)
class Ended:
    name: str
    status: str
    seconds: float
    found: str


def missing() -> list[str]:
    """Distributions that pyproject.toml asks for, with tests and CUDA 13, and that are not here."""
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [
        re.split(r"[^\w-]", one)[0] for one in project["dependencies"] + extras["test"] + extras["cuda13"]
    ]
    here = {re.sub("[_.]", "-", one.name.lower()) for one in importlib.metadata.distributions()}
    return [one for one in named if one not in here]


def stages(device: str, results: Path) -> Iterator[Stage]:
    """All stages, correctness first; writes the suites that they run."""
    gpu = device == "cuda"
    yield from _tests(device)
    yield from _benches(device, results)
    for name, (seconds, question, strategies, said) in _SUITES.items():
        few = strategies if gpu or said["cluster.nodes"] == 1 else strategies[:1] + strategies[-1:]
        keys = {key: said[key] for key in said if gpu or not key.startswith(("model.", "optimizer."))}
        keys |= {"cluster.device": device, "warmup": 2, "validate_every": 0, "validation_batches": 1}
        keys |= {"matrix.strategy": few} | ({} if gpu else _TINY)
        suite = results / f"gpu-{name[2:]}.toml"
        head = {"name": suite.stem, "question": question}
        tables = {key if key.startswith("matrix.") else f"defaults.{key}": keys[key] for key in keys}
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in (head | tables).items()]
        suite.write_text("".join(lines), encoding="utf-8")
        command = ("-m", "harness.cli", "run", "--no-report", str(suite), "--results", str(results))
        yield Stage(name, command, seconds if gpu else 240)


def _tests(device: str) -> Iterator[Stage]:
    """Laws and bits of every codec and kernel, the tests for a GPU, and the stress of streams."""
    gpu = device == "cuda"
    few = ("--examples", "6") if gpu else ("--codec", "int4:32", "--examples", "2", "--elements", "2000")
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
    yield Stage("a tests", (*pytest, *(kernels if gpu else short)), 240, needs)
    some = () if gpu else ("-k", "copies")
    yield Stage("a streams", (*pytest, "tests/impl/engine/test_streams.py", *some), 120, needs)


def _benches(device: str, results: Path) -> Iterator[Stage]:
    """GB/s of every kernel at several sizes, beside other libraries, and with one thing taken away each."""
    gpu = device == "cuda"
    bench = ("-m", "harness.cli", "bench", "codecs", "--seconds", "0.3" if gpu else "0.01")

    def of(name: str, *more: str, mebibytes: int = 256 if gpu else 1, needs: str = "torch") -> Stage:
        where = ("--results", str(results / name.replace(" ", "-")), "--megabytes", str(mebibytes))
        return Stage(f"b {name}", (*bench, *more, *where), 120, (needs,))

    few = () if gpu else ("--codec", "int4:32")
    for size in (256, 1, 16, 1024) if gpu else (1,):
        kinds = ("--kind", "fp32", "--kind", "bf16") if size == 256 else ()
        yield of(f"{size} MiB", "--backend", device, *kinds, *few, mebibytes=size)
    beside = ("--codec", "int8:2048", "--codec", "int8:256", "--codec", "int4:256")
    if gpu:
        names = (part for name in _ABLATED for part in ("--backend", f"cuda-{name}"))
        yield of("ablation", "--backend", "cuda", *names, *beside)
    for other, module in _OTHERS.items() if gpu else [("torch.compile", "torch")]:
        kind = "fp16" if other == "deepspeed" else "bf16"
        yield of(other, "--backend", device, "--backend", other, "--kind", kind, *beside, needs=module)


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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    shown = lines[-4 if told == "ok" else -30 :]
    print(f"== {stage.name}: {told}", *shown, sep="\n", flush=True)
    said = [line.strip() for line in lines if not line.endswith(".html")]  # a page's path says nothing
    found = said[-1][:100] if said else ""
    return Ended(stage.name, told, time.monotonic() - begun, found)


def table(ended: Sequence[Ended]) -> str:
    rows = [(one.name, one.status, f"{one.seconds:.0f}", one.found) for one in ended]
    whole = [("stage", "status", "s", "last line"), *rows]
    return "\n".join("{:20}  {:12}  {:>5}  {}".format(*row).rstrip() for row in whole)


def write_whole(path: Path, text: str) -> None:
    """Write a file that, whenever this is killed, holds the text before or this one."""
    aside = path.with_suffix(".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def pack(results: Path, into: Path) -> Path:
    """Write all that is in ``results``, but for what is drawn of records, to ``into/gpu-campaign.tar.gz``."""
    into.mkdir(parents=True, exist_ok=True)
    path = into / ARCHIVE
    aside = path.with_suffix(".part")  # whoever is killed meanwhile leaves the archive before this one
    with tarfile.open(aside, "w:gz") as archive:
        for found in sorted(results.rglob("*")):
            inside = found.relative_to(results)
            if found.is_file() and found not in (path, aside) and not _DRAWN & set(inside.parts):
                archive.add(found, Path("gpu-campaign", inside))
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
    asked = parser.parse_args(arguments)
    if asked.missing:
        print("\n".join(missing()))
        return 0
    results = asked.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    packed = results if asked.pack is None else asked.pack.resolve()
    ends, ended = time.monotonic() + 60 * asked.minutes, []
    for number, stage in enumerate(stages(asked.device, results)):
        if stage.name[0] in asked.stages:
            log = results / f"{number}-{stage.name.replace(' ', '-')}.log"
            letters = "".join(sorted(set(asked.stages)))  # of several calls into one folder
            found = results / f"campaign-{letters}.txt"
            begun = [*ended, Ended(stage.name, "not ended", 0.0, log.name)]
            write_whole(found, table(begun) + "\n")
            ended.append(run(stage, log, min(stage.seconds, ends - time.monotonic())))
            write_whole(found, table(ended) + "\n")
            pack(results, packed)
    print(table(ended))
    return int(any(one.status not in ("ok", "left out") for one in ended))


if __name__ == "__main__":
    sys.exit(main())
