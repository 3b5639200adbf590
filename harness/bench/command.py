"""``zeropp bench``: the speed of codecs, collectives and training, each beside what it is compared with.

A run leaves one record in ``<results>/bench-codecs``, ``bench-collectives``, ``bench-engine`` or
``bench-overlap``, prints its table and draws the page of its folder.  Records of other machines or code are
not joined.  torch is imported only once the command runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness import terminal
from harness.cluster.leaving import at_once
from harness.measure import machine
from harness.records import bench_record, engine_goals, overlap_goals
from harness.records.bench_record import Bench, BenchError, Kind, Subject

app = typer.Typer(
    help="Measure codecs beside a copy, collectives beside gloo's own, engines beside peers and compute.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Result = TypeVar("Result")
ResultsFolder = Annotated[Path, typer.Option("--results", help="Folder of all suites' results.")]
RESULTS: Final = Path("results")
KINDS: Final[tuple[Kind, ...]] = ("fp32", "bf16", "fp16")
MOST_RANKS: Final = 64
SIZES: Final = "1,16,64"
MOST_MEBIBYTES: Final = 1 << 16
GOAL_MISSED: Final = 1
_TIMEOUT_SECONDS: Final = 7200.0
_LOG: Final = "bench.log"

# The goals at 64 MiB with 4 ranks on one node, fp32: times gloo's own collective, by transport.
GOAL_SIZE: Final = 64 << 20
GOAL_TOPOLOGY: Final = (1, 4)
GOALS: Final = {
    ("all_gather", "shm"): 7.0,
    ("reduce_scatter", "shm"): 10.0,
    ("all_gather", "backend"): 2.0,
    ("reduce_scatter", "backend"): 3.5,
}


@app.command()
def codecs(  # noqa: PLR0917  # typer passes by name
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Codec, e.g. int8:2048; may be repeated. Default: one of every kind."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="cpu, cuda, reference, bitsandbytes, torchao; may be repeated. Default: all found."
        ),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Type of the elements: fp32, bf16, fp16; may be repeated.")
    ] = None,
    megabytes: Annotated[
        int | None,
        typer.Option(help="MiB of elements. Default: 64, on a GPU 256.", min=1, max=MOST_MEBIBYTES),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="For each operation, about.", min=0.0)] = 0.5,
    results: ResultsFolder = RESULTS,
) -> None:
    """GB/s of every codec and backend, each against a copy in the same round."""
    folder, pool = _folder("codecs", results)
    kinds = _chosen(kind or ["fp32"], KINDS, "type of elements")

    with at_once():
        from harness.bench import codecs as bench_codecs
        from harness.bench import peers
    from impl.codecs.codec import CodecError, parse

    try:
        texts = tuple(dict.fromkeys(str(parse(text)) for text in codec or bench_codecs.CODECS))
    except CodecError as error:
        raise BenchError(str(error)) from None
    asked = _chosen(backend or bench_codecs.BACKENDS, bench_codecs.BACKENDS, "backend")
    here, missing = bench_codecs.found()
    for name in backend or []:
        if name in missing:
            raise BenchError(f"backend {name!r} is not here: {missing[name]}")
    if codec is not None and backend is None:  # peers have no codec of ours
        asked = tuple(name for name in asked if name not in peers.NAMES)
    setting = bench_codecs.Setting(
        texts, tuple(name for name in asked if name in here), kinds, megabytes, threads, seconds
    )
    told = {
        "codecs": list(texts), "backends": list(setting.backends), "kinds": list(kinds),
        "megabytes": megabytes, "threads": threads, "seconds": seconds,
        "peers": peers.versions(setting.backends),
    }  # fmt: skip
    started = _now()
    (samples,) = _on_ranks(bench_codecs.measure, setting, folder, threads=threads)
    if not samples:
        raise BenchError(
            f"nothing to measure: no chosen backend ({', '.join(setting.backends)}) has kernels for "
            f"{', '.join(texts)}"
        )
    _finish(folder, _bench("codecs", started, told, pool, missing=missing, codecs=samples))


@app.command()
def collectives(  # noqa: PLR0917  # typer passes by name
    nodes: Annotated[int | None, typer.Option(help="Nodes. Default: 1x4 ranks, then 2x2.", min=1)] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of each node.", min=1)] = None,
    megabytes: Annotated[str, typer.Option(help="MiB of the whole tensor, by commas.")] = SIZES,
    rate: Annotated[
        str, typer.Option(help="Of the link between nodes, e.g. '1 Gbit/s', or unshaped.")
    ] = "unshaped",
    seconds: Annotated[float, typer.Option(help="For each size, about.", min=0.0)] = 20.0,
    results: ResultsFolder = RESULTS,
) -> None:
    """Seconds and bytes of every algorithm and transport beside gloo's own; status 1 below the goals."""
    folder, pool = _folder("collectives", results)
    sizes, mbit = _sizes(megabytes), _rate(rate)
    topologies = [(nodes or 1, ranks or 4)] if nodes or ranks else [GOAL_TOPOLOGY, (2, 2)]
    for each in topologies:
        if each[0] * each[1] < 2:
            raise BenchError(f"{each[0]} nodes x {each[1]} ranks: a collective needs 2 ranks at least")
        if each[0] * each[1] > MOST_RANKS:
            raise BenchError(f"{each[0]} nodes x {each[1]} ranks: at most {MOST_RANKS} start on one machine")

    with at_once():
        from harness.bench import collectives as bench_collectives

    setting = bench_collectives.Setting(sizes, mbit, seconds)
    told = {
        "topologies": [list(each) for each in topologies], "megabytes": list(sizes), "rate_mbit": mbit,
        "seconds": seconds,
    }  # fmt: skip
    started = _now()
    samples = []
    for topology in topologies:
        of_ranks = _on_ranks(bench_collectives.measure, setting, folder, topology=topology, rate_mbit=mbit)
        samples += bench_collectives.together(of_ranks)
    bench = _bench("collectives", started, told, pool, collectives=samples)
    _finish(folder, bench)
    if any(not met for met in goals(bench).values()):
        raise typer.Exit(GOAL_MISSED)


@app.command()
def engine(  # noqa: PLR0917  # typer passes by name
    nodes: Annotated[
        int | None, typer.Option(help="Nodes. Default: 1x4 ranks unshaped, then 2x2 at 1 Gbit/s.", min=1)
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of each node.", min=1)] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Of the link between nodes, with --nodes and --ranks, e.g. '1 Gbit/s'; unshaped."),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="ddp, fsdp2, deepspeed, exact, ...; may be repeated. Default: all found."),
    ] = None,
    model: Annotated[str, typer.Option(help="A GPT preset of suites.")] = engine_goals.MODEL,
    seconds: Annotated[float, typer.Option(help="For each topology, about.", min=0.0)] = 240.0,
    results: ResultsFolder = RESULTS,
) -> None:
    """Tokens per second of training beside DDP, FSDP2 and DeepSpeed; status 1 below the goals."""
    folder, pool = _folder("engine", results)
    places = _places(nodes, ranks, rate)

    with at_once():
        from harness.bench import deepspeed_peer
        from harness.bench import engine as bench_engine
    from harness.suites.model_sizes import PRESETS, GPTShape

    gpts = tuple(name for name, shape in PRESETS.items() if isinstance(shape, GPTShape))
    _chosen([model], gpts, "model")
    asked = _chosen(contender or bench_engine.NAMES, bench_engine.NAMES, "contender")
    missing = {}
    if (why := deepspeed_peer.why_missing()) is not None and set(asked) & set(bench_engine.DEEPSPEED):
        if contender:
            raise BenchError(why)
        missing = {"deepspeed": why}
        asked = tuple(name for name in asked if name not in bench_engine.DEEPSPEED)
    names = tuple(dict.fromkeys((engine_goals.ALONE, *asked)))
    told = {
        "places": [list(each) for each in places], "contenders": list(names), "model": model,
        "sequence": engine_goals.SEQUENCE, "sequences": engine_goals.SEQUENCES, "seconds": seconds,
        "deepspeed": None if why else deepspeed_peer.version(),
    }  # fmt: skip
    started = _now()
    samples: list[bench_record.EngineSample] = []
    for nodes_here, ranks_here, mbit in places:
        setting = bench_engine.Setting(
            names, mbit, seconds, model, engine_goals.SEQUENCE, engine_goals.SEQUENCES
        )
        of_ranks = _on_ranks(
            bench_engine.measure, setting, folder, topology=(nodes_here, ranks_here), rate_mbit=mbit,
            kind="namespaces",
        )  # fmt: skip
        samples += bench_engine.together(of_ranks)
    if (words := engine_goals.unequal(samples)) is not None:
        raise BenchError(words)
    _finish(folder, _bench("engine", started, told, pool, missing=missing, engine=samples))
    if any(not verdict.met for verdict in engine_goals.verdicts(samples)):
        raise typer.Exit(GOAL_MISSED)


@app.command()
def overlap(  # noqa: PLR0917  # typer passes by name
    model: Annotated[str, typer.Option(help="A GPT preset of suites.")] = overlap_goals.MODEL,
    layers: Annotated[int, typer.Option(help="Of the model.", min=1)] = overlap_goals.LAYERS,
    sequences: Annotated[int, typer.Option(help="Of each rank in a step.", min=1)] = overlap_goals.SEQUENCES,
    megabytes: Annotated[
        int, typer.Option(help="MiB of the fp32 gradient.", min=1, max=MOST_MEBIBYTES)
    ] = overlap_goals.MEBIBYTES,
    chunks: Annotated[int, typer.Option(help="Of a reduction.", min=2)] = overlap_goals.CHUNKS,
    seconds: Annotated[float, typer.Option(help="For each policy and for the hops, about.", min=0.0)] = 90.0,
    results: ResultsFolder = RESULTS,
) -> None:
    """Steps on a slow link beside compute alone, and hops in chunks; status 1 below the goals."""
    folder, pool = _folder("overlap", results)

    with at_once():
        from harness.bench import overlap as bench_overlap
    from harness.suites.model_sizes import PRESETS, GPTShape

    gpts = tuple(name for name, shape in PRESETS.items() if isinstance(shape, GPTShape))
    _chosen([model], gpts, "model")
    told = {
        "model": model, "layers": layers, "sequence": overlap_goals.SEQUENCE, "sequences": sequences,
        "megabytes": megabytes, "chunks": chunks, "seconds": seconds,
    }  # fmt: skip
    started = _now()
    place = bench_overlap.TOPOLOGY_OF_STEP
    alone = bench_overlap.StepSetting(model, layers, overlap_goals.SEQUENCE, sequences, seconds)
    rates = bench_overlap.rates_for_steps(
        _on_ranks(bench_overlap.compute_alone, alone, folder, topology=place)
    )
    steps = []
    for policy, rate in rates.items():
        setting = replace(alone, policy=policy, rate_mbit=rate)
        ranks = _on_ranks(
            bench_overlap.step, setting, folder, topology=place, rate_mbit=rate, kind="namespaces"
        )
        steps.append(bench_overlap.together(ranks))
    place = bench_overlap.TOPOLOGY_OF_HOPS
    reductions = bench_overlap.HopsSetting(megabytes, chunks, seconds)
    rate = bench_overlap.rate_for_hops(
        _on_ranks(bench_overlap.first_hop, reductions, folder, topology=place), reductions
    )
    reductions = replace(reductions, rate_mbit=rate)
    found = _on_ranks(
        bench_overlap.hops, reductions, folder, topology=place, rate_mbit=rate, kind="namespaces"
    )
    hops = [bench_overlap.together(found)]
    _finish(folder, _bench("overlap", started, told, pool, overlap_steps=steps, overlap_hops=hops))
    if any(not verdict.met for verdict in overlap_goals.verdicts(steps, hops)):
        raise typer.Exit(GOAL_MISSED)


def _places(nodes: int | None, ranks: int | None, rate: str | None) -> list[tuple[int, int, float | None]]:
    """Nodes, ranks of each, and the rate of the link between nodes, of every topology to run.

    The shaped one comes first: where there are no namespaces, nothing has been measured in vain.
    """
    if not nodes and not ranks:
        if rate is not None:
            raise BenchError(f"--rate {rate!r}: say --nodes and --ranks with it")
        return [(2, 2, 1000.0), (1, 4, None)]
    place = (nodes or 1, ranks or 4, _rate(rate or "unshaped"))
    if not 2 <= place[0] * place[1] <= MOST_RANKS:
        raise BenchError(f"{place[0]} nodes x {place[1]} ranks: expected 2 to {MOST_RANKS} ranks in all")
    if place[0] == 1 and place[2] is not None:
        raise BenchError(f"--rate {rate!r}: one node has no link between nodes")
    return [place]


def show(folder: Path, out: Console) -> None:
    """Print the table of a folder of benchmark records."""
    _print(bench_record.read_all(folder), out)


def _finish(folder: Path, bench: Bench) -> None:
    """Write the record, print its table, and draw the page of all records of the folder."""
    bench_record.write(folder, bench)
    out = terminal.console()
    _print([bench], out)
    for name, why in bench.missing.items():
        out.print(f"not here: {escape(name)}: {escape(why)}")

    from report.bench.page import build

    print(build(folder))


def _print(benches: list[Bench], out: Console) -> None:
    from report.bench.page import table_of

    found = table_of(benches)
    table = Table(box=box.SIMPLE_HEAD, title=found.title, title_justify="left")
    for column in found.columns:
        table.add_column(column.title, justify="right" if column.numeric else "left", overflow="fold")
    for row in found.rows():
        table.add_row(*(escape(cell) for cell in row))
    out.print(table)
    for verdict in engine_goals.verdicts(benches[-1].engine):
        out.print(engine_goals.told(verdict))
    for shown in overlap_goals.verdicts(benches[-1].overlap_steps, benches[-1].overlap_hops):
        out.print(overlap_goals.told(shown))
    for (operation, transport), met in goals(benches[-1]).items():
        goal = GOALS[operation, transport]
        out.print(f"goal: {operation} over {transport} >= {goal:g} x gloo's: {'met' if met else 'MISSED'}")


def goals(bench: Bench) -> dict[tuple[str, str], bool]:
    """Whether the best fp32 algorithm reaches each goal; empty where the goals' setting was not run."""
    from harness.records.statistics import median_interval

    best: dict[tuple[str, str], float] = {}
    for sample in bench.collectives:
        at_goal = (sample.nodes, sample.ranks_per_node, 4 * sample.numel) == (*GOAL_TOPOLOGY, GOAL_SIZE)
        if at_goal and set(sample.codecs) == {"fp32"}:
            pairs = zip(sample.reference_seconds, sample.seconds, strict=True)
            ratio = median_interval([reference / took for reference, took in pairs]).estimate
            key = sample.operation, sample.transport
            best[key] = max(best.get(key, 0.0), ratio)
    return {key: best[key] >= goal for key, goal in GOALS.items() if key in best}


def _bench(subject: Subject, started: str, setting: dict[str, Any], pool: str, **samples: Any) -> Bench:
    return Bench(
        subject=subject, started=started, finished=_now(), setting=setting, machine=machine.facts(),
        code=machine.code(), pool=pool, **samples,
    )  # fmt: skip


def _folder(subject: Subject, results: Path) -> tuple[Path, str]:
    """The folder of records, which this machine and code may join, and their pool."""
    folder, pool = results / bench_record.FOLDERS[subject], machine.pool_key(machine.facts(), machine.code())
    bench_record.check_pool(folder, pool)
    return folder, pool


def _on_ranks(
    target: Callable[[Any, Any], Result],
    setting: Any,
    folder: Path,
    *,
    topology: tuple[int, int] = (1, 1),
    rate_mbit: float | None = None,
    threads: int = 1,
    kind: Literal["auto", "namespaces"] = "auto",
) -> list[Result]:
    """Run ``target`` on fresh processes, and show how far they are.

    A link with a rate is of ``kind``: peers, who send past our wire, are held to it by namespaces alone.
    """
    from harness.cluster.link import LinkError, Setting, open_link
    from harness.cluster.processes import Launch, LaunchError, run_ranks
    from impl.plan.topology import Topology

    wanted = Setting("none" if rate_mbit is None else kind, topology[0], rate_mbit)
    try:
        with open_link(wanted, "bench") as link, _shown() as report:
            launch = Launch(
                Topology(*topology), link.ports, link.paced_mbit, threads, _TIMEOUT_SECONDS, folder / _LOG
            )
            return run_ranks(target, setting, launch, report)
    except LinkError as error:
        raise BenchError(str(error)) from None
    except LaunchError as error:
        log = f"; log {error.log}" if error.log else ""
        raise BenchError(f"{str(error).splitlines()[0]}{log}") from None


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[Any], None]]:
    """A bar on standard error, on a terminal only."""
    out = terminal.console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("set-up", total=None)
        yield lambda far: bar.update(task, description=far.stage, completed=far.step, total=far.steps or None)


def _chosen(given: Any, allowed: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    for name in given:
        if name not in allowed:
            raise BenchError(f"unknown {what} {name!r}: expected one of {', '.join(allowed)}")
    return tuple(dict.fromkeys(given))


def _sizes(text: str) -> tuple[int, ...]:
    """MiB from ``1,16,64``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and 0 < int(part) <= MOST_MEBIBYTES for part in parts):
        raise BenchError(f"--megabytes {text!r}: expected whole MiB from 1 to {MOST_MEBIBYTES}, by commas")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _rate(text: str) -> float | None:
    """Mbit/s from a rate with its unit; None for unshaped."""
    from harness.suites.trial import parse_rate

    try:
        found = parse_rate(text)
    except ValueError as error:
        raise BenchError(f"--rate {text!r}: {error}") from None
    return found if isinstance(found, float) else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
