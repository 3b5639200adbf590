"""``zeropp bench``: parses the options of the benchmarks, runs them in fresh processes, and writes their records.

Each run writes one record into ``<results>/bench-SUBJECT`` and returns the record's path; then :mod:`harness.cli`
prints the record as a table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

import typer

from harness import terminal_table
from harness.cluster import interrupts
from harness.cluster.rank import Rank
from harness.errors import Refusal
from harness.measure import machine
from harness.records import bench_record
from harness.records.bench_record import Bench, ElementType, Sample, Subject, merge_ranks
from harness.suites.labels import counted
from harness.suites.parse_quantity import CANONICAL, parse_rate

app = typer.Typer(
    help="Time codecs against a copy, collectives against gloo's, and the overlap of communication with "
    "computation; rank codecs by error.",
    rich_markup_mode=None,
)

Result = TypeVar("Result")
Several = list[str] | None
Topology = tuple[int, int]  # number of nodes, and number of ranks on each node
# A topology, and the rate of its link between nodes in Mbit/s; None for no limit.
Place = tuple[Topology, float | None]
MOST_RANKS: Final = 64
MOST_MEBIBYTES: Final = 1 << 16
MOST_SECONDS: Final = 3600.0  # about half of the timeout, after which nothing is recorded
_TIMEOUT_SECONDS: Final = 7200.0

Results = Annotated[Path, typer.Option("--results", help="Folder of all suites' results.")]
_BACKENDS: Final = (
    "Backend or library to time: cpu, cuda, reference, bitsandbytes, torchao, torch.compile or deepspeed; or "
    "CUDA kernels without one optimisation: cuda-general, cuda-shared-memory, cuda-two-reads, cuda-unfused, "
    "cuda-narrow or cuda-few-warps. Default: all that are available, with all optimisations."
)
Mebibytes = partial(typer.Option, metavar="MIB", min=1, max=MOST_MEBIBYTES)


@app.command()
def codecs(
    *,
    codec: Annotated[
        Several, typer.Option(help="Codec in its text form, such as int4:256. Default: one of every kind.")
    ] = None,
    backend: Annotated[Several, typer.Option(help=_BACKENDS)] = None,
    kind: Annotated[
        Several, typer.Option(help="Type of the elements: fp32, bf16 or fp16. Default: fp32.")
    ] = None,
    megabytes: Annotated[
        int | None, Mebibytes(help="Size of the elements in MiB. Default: 64, and 256 on a GPU.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that torch may use.", min=1)] = 1,
    seconds: Annotated[
        float, typer.Option(help="About how long to time each operation.", min=0.0, max=MOST_SECONDS)
    ] = 0.5,
    results: Results = Path("results"),
) -> Path:
    """Measure the GB/s of every codec and backend, against a copy of the same elements in the same round.

    --codec, --backend and --kind may be given several times.
    """
    run = _Run("codecs", results)

    from harness.bench import codecs as bench_codecs
    from harness.bench import other_libraries
    from impl.codecs.codec import parse

    parsed = dict.fromkeys(map(parse, codec or bench_codecs.CODECS))
    for one in parsed:
        one.frame_bytes(1)  # raises an error for a codec whose module or package is missing
    texts = tuple(map(str, parsed))
    usual = bench_codecs.OURS if codec else bench_codecs.USUAL  # other libraries do not have our codecs
    backends, kinds = list(dict.fromkeys(backend or usual)), list(dict.fromkeys(kind or ("fp32",)))
    axes = {"--backend": (backends, bench_codecs.BACKENDS), "--kind": (kinds, get_args(ElementType))}
    for option, (names, known) in axes.items():
        if unknown := [name for name in names if name not in known]:
            raise Refusal(f"unknown {option} {unknown[0]!r}: expected one of {', '.join(known)}")
    if codec and set(backends) <= {*other_libraries.QUANTISERS}:
        raise Refusal(
            f"--codec {codec[0]} does not apply to --backend {backends[0]}, which has quantisers of its own: "
            "also give a backend of this project, such as --backend cpu, or leave --codec out"
        )
    candidates = dict.fromkeys((*backends, *bench_codecs.USUAL))
    missing = {name: why for name in candidates if (why := bench_codecs.why_missing(name)) is not None}
    absent = [name for name in backends if name in missing]
    if backend and absent:
        raise Refusal(f"--backend {absent[0]!r} is not available here: {missing[absent[0]]}")
    backends = [name for name in backends if name not in absent]
    arguments: dict[str, Any] = {"codecs": texts, "backends": backends, "kinds": kinds}
    target = partial(bench_codecs.measure, **arguments, mebibytes=megabytes, seconds=seconds)
    (samples,) = run.on_ranks(target, threads=threads)
    setting = {**target.keywords, "threads": threads, "peers": other_libraries.versions(backends)}
    return run.finish(samples, setting, missing)


@app.command()
def collectives(
    *,
    nodes: Annotated[int, typer.Option(help="Number of emulated nodes.", min=1)] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks on each node.", min=1)] = 2,
    megabytes: Annotated[
        list[int] | None,
        Mebibytes(help="Size of the tensor in MiB; may be given several times. Default: 1, 16 and 64."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Rate of the link between nodes, such as '1 Gbit/s'. Default: unshaped."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="About how long to time each size.", min=0.0, max=MOST_SECONDS)
    ] = 20.0,
    results: Results = Path("results"),
) -> Path:
    """Measure the seconds and bytes of every collective algorithm and transport, against gloo's collectives."""
    run = _Run("collectives", results)
    try:
        mbit: Any = parse_rate(rate)
    except ValueError as error:
        raise Refusal(f"--rate {rate!r}: {error}") from None
    if not 2 <= nodes * ranks <= MOST_RANKS:
        raise Refusal(f"--nodes {nodes} --ranks {ranks}: expected 2 to {MOST_RANKS} ranks in all")
    if nodes == 1 and mbit is not None:
        raise Refusal(
            f"--rate {rate!r} needs a link between nodes: use at least --nodes 2, or leave --rate out"
        )

    from harness.bench import collectives as bench_collectives

    place, sizes, samples = ((nodes, ranks), mbit), megabytes or [1, 16, 64], []
    for size in sizes:
        samples += run.at(place, partial(bench_collectives.measure, mebibytes=size, seconds=seconds))
    return run.finish(samples, {"mebibytes": sizes, "seconds": seconds, "place": place})


@app.command()
def overlap(
    *,
    layers: Annotated[int, typer.Option(help="Layers of the model, a gpt-small.", min=1)] = 16,
    sequences: Annotated[int, typer.Option(help="Sequences that each rank reads in a step.", min=1)] = 96,
    megabytes: Annotated[int, Mebibytes(help="Size of the fp32 gradient in MiB, for the hops.")] = 128,
    seconds: Annotated[
        float,
        typer.Option(
            help="About how long to time each policy, and then the hops.", min=0.0, max=MOST_SECONDS
        ),
    ] = 90.0,
    results: Results = Path("results"),
) -> Path:
    """Measure how much communication overlaps with computation, and a reduction's two hops with each other.

    Training steps over a slow link are timed against the same steps without communication.  Reductions in several
    chunks are timed against reductions in one chunk.
    """
    run = _Run("overlap", results)

    from harness.bench import overlap as bench_overlap

    two, four = bench_overlap.TOPOLOGY_OF_STEP, bench_overlap.TOPOLOGY_OF_HOPS
    trained: dict[str, Any] = {"layers": layers, "sequences": sequences}
    alone = run.on_ranks(partial(bench_overlap.compute_alone, **trained), two)
    samples = []
    for policy, mbit in bench_overlap.rates_for_steps(alone).items():
        step = partial(bench_overlap.step, policy=policy, seconds=seconds, **trained)
        samples += run.at((two, mbit), step)
    first = run.on_ranks(partial(bench_overlap.first_hop, mebibytes=megabytes), four)
    hops = partial(bench_overlap.hops, mebibytes=megabytes, seconds=seconds)
    samples += run.at((four, bench_overlap.rate_for_hops(first, megabytes)), hops)
    return run.finish(samples, {**trained, **hops.keywords})


class _Run:
    """One run of a benchmark command, which writes one record into the folder ``bench-SUBJECT`` of the results."""

    def __init__(self, subject: Subject, results: Path) -> None:
        self._folder = results / f"bench-{subject}"
        facts, code = machine.facts(), machine.code()
        pool = machine.pool_key(facts, code)
        self._fixed = {"subject": subject, "machine": facts, "code": code, "pool": pool, "started": _now()}
        existing = next(
            path
            for path in (self._folder, *self._folder.absolute().parents)
            if path.exists() or path.is_symlink()
        )
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise Refusal(
                f"--results {results}: {existing} is not a folder, or cannot be written; name another folder"
            )
        records = bench_record.read_all(self._folder) if any(self._folder.glob("*.json")) else []
        if pools := [bench.pool for bench in records if bench.pool != pool]:
            raise Refusal(
                f"{self._folder}: holds {counted(len(pools), 'record')} of another machine or version of the code "
                f"(hash {pools[0]}), which cannot be compared with records of this run (hash {pool}); move the folder "
                "aside, or name another folder with --results"
            )

    def at(self, place: Place, target: Callable[[Rank], Sequence[Sample]]) -> list[Sample]:
        """Run ``target`` on all ranks, over a link between nodes, and return the merged samples.

        ``place`` has the topology of the ranks and the rate of the link.  A merged sample has the slowest rank's
        seconds of each round, and the sum of all ranks' bytes.  The topology and the rate are added to its ``names``.
        """
        topology, mbit = place
        names = {"nodes": topology[0], "ranks_per_node": topology[1], "rate_mbit": mbit}
        samples = merge_ranks(self.on_ranks(target, topology, mbit))
        return [sample.model_copy(update={"names": sample.names | names}) for sample in samples]

    def on_ranks(
        self,
        target: Callable[[Rank], Result],
        topology: Topology = (1, 1),
        mbit: float | None = None,
        *,
        threads: int = 1,
    ) -> list[Result]:
        """Run ``target`` in fresh processes, one for each rank, and return its results in rank order.

        If ``mbit`` is None, all ranks share the loopback interface, without a limit.  Otherwise each node is a network
        namespace, and the kernel limits the rate between nodes to ``mbit`` Mbit/s.  A paced link, in which the sending
        process delays messages, is not used: it delays this project's collectives, but not gloo's.

        Raises:
            LaunchError: If a process fails.
        """
        from harness.cluster.link import open_link
        from harness.cluster.rank_processes import Launch, run_ranks
        from harness.suites.trial import Cluster
        from impl.policy import topology as plan

        interrupts.take_over()
        kind = "none" if mbit is None else "namespaces"
        fields = {"link": kind, "nodes": topology[0], "rate": mbit}
        status = terminal_table.console(stderr=True).status("set-up")  # prints nothing without a terminal
        with open_link(Cluster.model_validate(fields, context=CANONICAL), "bench") as link, status:
            launch = Launch(
                plan.Topology(*topology), link.ports, link.paced_mbit, threads, _TIMEOUT_SECONDS,
                self._folder / "bench.log",
            )  # fmt: skip
            return run_ranks(_call, target, launch, lambda progress: status.update(progress.stage))

    def finish(
        self, samples: Sequence[Sample], setting: dict[str, Any], missing: dict[str, str] | None = None
    ) -> Path:
        """Write the benchmark's record and return its path.

        Args:
            samples: The measured seconds and bytes.
            setting: The options of the command.
            missing: By name of a backend or library that was not measured, the reason.
        """
        import torch

        from impl import ops

        missing = dict(missing or {})
        if (why := ops.warning_of(torch.device("cpu"))) is not None:
            missing["cpu"] = f"{why}; the reference backend was timed in its place"
        fields = {"finished": _now(), "setting": setting, "missing": missing, "samples": samples}
        return bench_record.write(self._folder, Bench.model_validate(self._fixed | fields))


def _call(rank: Rank, target: Callable[[Rank], Result]) -> Result:
    return target(rank)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
