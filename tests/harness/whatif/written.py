"""Writes small traces in the format of torch.profiler, whose steps have known durations.

The keys of gloo's events are those that torch 2.13 writes on a CPU, and the keys of NCCL's kernels are those of the
real trace in ``data``, which is a part of HolisticTraceAnalysis's ``nccl_data.json.gz`` (MIT, Meta Platforms).
Times are in milliseconds.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
REAL = DATA / "ddp_two_a100_rank0.json.gz"


@dataclass
class Writer:
    """The trace of one rank."""

    rank: int
    world: int = 2
    host: str = "a"
    clock: float = 0.0  # how far the host's clock is ahead
    groups: list[list[int]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, name: str, begin: float, end: float, category: str = "cpu_op", thread: int = 1, **args: Any
    ) -> None:
        """Add an event."""
        times = {"ts": 1e3 * (begin + self.clock), "dur": 1e3 * (end - begin)}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": args}
        )

    def step(self, number: int, begin: float, end: float) -> None:
        """Add a step."""
        self.add(f"ProfilerStep#{number}", begin, end, "user_annotation")

    def gloo(
        self, name: str, elements: int, issue: float, begin: float, end: float, *, blocking: bool = False
    ) -> None:
        """Add a collective of gloo over ``elements`` of fp32 in all."""
        run = {
            "_allgather_base_": "all_gather",
            "allreduce_": "all_reduce",
            "_reduce_scatter_base_": "all_reduce",
        }[name]
        dims, kind = ([[[elements]]], ["TensorList"]) if name == "allreduce_" else ([[elements]], ["float"])
        concrete = ["", str(not blocking), "-1"]
        returns = end if blocking else issue
        self.add(
            f"c10d::{name}",
            issue,
            returns,
            **{"Input Dims": dims, "Input type": kind, "Concrete Inputs": concrete},
        )
        shown = elements // self.world if run == "all_gather" else elements
        shapes = {"Input Dims": [[shown]], "Input type": ["float"]}
        self.add(f"gloo:{run}", begin, end, "user_annotation", 9, **shapes)

    def kernel(self, name: str, launch: float, begin: float, end: float, stream: int, **args: Any) -> None:
        """Add a kernel and its launch."""
        number = len(self.events)
        self.add("cudaLaunchKernel", launch, launch + 0.002, "cuda_runtime", correlation=number)
        self.add(name, begin, end, "kernel", stream, stream=stream, correlation=number, **args)

    def nccl(self, name: str, elements: int, launch: float, begin: float, end: float, **args: Any) -> None:
        """Add a collective of NCCL over ``elements`` of bf16 in all."""
        facts = {
            "Collective name": name, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "BFloat16",
            "Group size": self.world, "Process Group Name": "0", "Process Group Ranks": str([*range(self.world)]),
        }  # fmt: skip
        self.kernel(f"ncclDevKernel_{name}", launch, begin, end, 20, **(facts | args))

    def whole(self) -> dict[str, Any]:
        """Return the whole file's object."""
        groups = self.groups or [[*range(self.world)]]
        about = {
            "backend": "gloo", "rank": self.rank, "world_size": self.world,
            "pg_config": [{"pg_name": str(number), "ranks": ranks} for number, ranks in enumerate(groups)],
        }  # fmt: skip
        head = {"schemaVersion": 1, "distributedInfo": about, "host_name": self.host}
        return {**head, "traceEvents": self.events, "displayTimeUnit": "ms", "baseTimeNanoseconds": 10**18}

    def write(self, folder: Path, *, zipped: bool = False) -> Path:
        """Write the file and return its path."""
        text = json.dumps(self.whole(), indent=1).encode()
        path = folder / f"rank{self.rank}.json{'.gz' * zipped}"
        path.write_bytes(gzip.compress(text) if zipped else text)
        return path


FORWARD, BACKWARD, FIRST, OPTIMIZER = 10.0, 20.0, 8.0, 3.0
BUCKETS = (1_000_000, 500_000)  # elements of fp32
RATE = 1e5  # bytes a millisecond of the traced link: 100 MB/s


def ddp_seconds(rate: float = RATE, item: int = 4, world: int = 2) -> float:
    """Return the milliseconds of a step of :func:`ddp` by hand: the second bucket follows the first on the link."""
    first, second = (2 * size * item * (world - 1) / world / rate for size in BUCKETS)
    done = max(FORWARD + FIRST + first, FORWARD + BACKWARD) + second
    return max(FORWARD + BACKWARD, done) + OPTIMIZER


def ddp(writer: Writer, *, steps: int = 2, first: int = 3, late: float = 0.0) -> Writer:
    """Add steps of DDP over gloo: two buckets, of which the first is sent during backward.

    ``late`` is by how much this rank computes its forward pass faster than :data:`FORWARD`; it then waits.
    """
    begin = 100.0
    for number in range(first, first + steps):
        writer.step(number, begin, begin + ddp_seconds())
        forward = begin + FORWARD - late
        writer.add("DistributedDataParallel.forward", begin, forward, "user_annotation")
        writer.add("aten::mm", begin, forward)
        issue, end = forward + FIRST, forward + BACKWARD
        writer.add("autograd::engine::evaluate_function: A", forward, issue)
        times = [2 * size * 4 / 2 / RATE for size in BUCKETS]
        joint = begin + FORWARD + FIRST  # when the last rank arrives
        writer.gloo("allreduce_", BUCKETS[0], issue, issue, joint + times[0])
        writer.add("autograd::engine::evaluate_function: B", issue, end)
        begun = max(joint + times[0], begin + FORWARD + BACKWARD)
        writer.gloo(
            "allreduce_", BUCKETS[1], end, end, begun + times[1]
        )  # gloo's second thread shares the link
        done = max(begun + times[1], end)
        writer.add("Optimizer.step#SGD.step", done, done + OPTIMIZER, "user_annotation")
        writer.add("aten::add_", done, done + OPTIMIZER)
        begin += ddp_seconds()
    return writer


UNITS = {"a": 400_000, "b": 800_000}


def fsdp(writer: Writer, *, steps: int = 2) -> Writer:
    """Add steps of FSDP2 over gloo: two units, whose gathers and reduce-scatters the host waits for."""
    begin = 100.0
    for number in range(3, 3 + steps):
        now = begin
        for name, size in UNITS.items():
            now = _gather(writer, name, size, now, "pre_forward")
            writer.add("aten::mm", now, now + 5)
            writer.add(f"FSDP::post_forward ({name})", now + 4.99, now + 4.999, "user_annotation")
            now += 5
        for name, size in reversed(UNITS.items()):
            now = _gather(writer, name, size, now, "pre_backward")
            writer.add("autograd::engine::evaluate_function: A", now, now + 10)
            now += 10
            end = now + 2 * size * 4 / 2 / RATE  # gloo's reduce-scatter is an all-reduce
            writer.gloo("_reduce_scatter_base_", size, now, now, end, blocking=True)
            writer.add(f"FSDP::post_backward_reduce ({name})", now, end, "user_annotation")
            now = end
        writer.add("Optimizer.step#SGD.step", now, now + OPTIMIZER, "user_annotation")
        writer.add("aten::add_", now, now + OPTIMIZER)
        writer.step(number, begin, now + OPTIMIZER)
        begin = now + OPTIMIZER
    return writer


def _gather(writer: Writer, name: str, size: int, now: float, phase: str) -> float:
    end = now + size * 4 / 2 / RATE
    writer.add(f"FSDP::{phase} ({name})", now, end, "user_annotation")
    writer.gloo("_allgather_base_", size, now, now, end, blocking=True)
    return end


def fsdp_seconds(rate: float = RATE, *, kept: bool = False) -> float:
    """Return the milliseconds of a step of :func:`fsdp` by hand."""
    gathers = 1 if kept else 2
    return 30 + OPTIMIZER + sum(UNITS.values()) * (gathers * 4 / 2 + 2 * 4 / 2) / rate


def on_gpu(writer: Writer, *, steps: int = 3, compute: float = 20.0, sent: float = 30.0) -> Writer:
    """Add steps of a GPU: half of ``compute``, an all-reduce of ``sent`` ms, the other half, and the optimizer."""
    begin = 100.0
    half, end = compute / 2, max(compute, compute / 2 + sent)
    for number in range(3, 3 + steps):
        writer.step(number, begin, begin + end + OPTIMIZER)
        writer.add("autograd::engine::evaluate_function: A", begin, begin + 2)
        writer.kernel("gemm", begin, begin + 0.01, begin + half, 7)
        writer.nccl("allreduce", 3_000_000, begin + 0.1, begin + half, begin + half + sent)
        writer.kernel("gemm", begin + 0.2, begin + half, begin + compute, 7)
        writer.add("Optimizer.step#SGD.step", begin + 2, begin + 3, "user_annotation")
        writer.kernel("adam", begin + 2.1, begin + end, begin + end + OPTIMIZER, 7)
        writer.add("cudaStreamSynchronize", begin + 3, begin + end + OPTIMIZER, "cuda_runtime")
        begin += end + OPTIMIZER
    return writer
