"""``zeropp whatif``: parses options, predicts each policy at each rate, and prints the predictions."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from harness import plan_rows, terminal_table
from harness.cluster import interrupts
from harness.errors import Refusal
from harness.measure import machine_file
from harness.suites.parse_quantity import parse_rate
from harness.terminal_table import Column
from harness.whatif import export as exporting
from harness.whatif import joint, kineto
from harness.whatif.policies import REWRITES, SAME, Target
from harness.whatif.predict import about, check_replay, predict, row, target_topology
from impl.plan.step_time import Machine
from impl.policy.topology import Topology

MOST_RANKS: Final = 1024  # largest number of traces that are read
MOST_PREDICTED: Final = 1 << 16  # largest number of ranks of a predicted run


def _speed_up_mark(row: Mapping[str, Any]) -> str:
    """Return the interval of a predicted speed-up as text, such as ``(0.95 to 1.10) ?`` with a space before it.

    The text ends in ``?`` if 1 lies between the ends of the interval.  It is then not known whether the policy or the
    program as traced is faster.  The text is empty if both ends are equal.
    """
    mark = " ?" if _undecided(row) else ""
    return terminal_table.interval(row["low_speed_up"], row["high_speed_up"], ".2f") + mark


def _undecided(row: Mapping[str, Any]) -> bool:
    return bool(row["low_speed_up"] < 1 < row["high_speed_up"])


_COLUMNS: Final = (
    Column("policy", always=True),
    Column("rate_mbit", "rate", ",.4g", "Mbit/s", always=True),
    Column("seconds", "step", ".4g", "s", always=True),
    Column("low_seconds", "from", ".4g", "s"),
    Column("high_seconds", "to", ".4g", "s"),
    Column("speed_up", "speed-up", ".2f", always=True, mark=_speed_up_mark),
    Column("exposed_seconds", "exposed", ".3g", "s", rank=1),
    Column("link_seconds", "on the link", ".3g", "s", rank=2),
    Column("bound", "bound by", rank=1),
    Column("break_even_mbit", "break-even", ",.0f", "Mbit/s", rank=1),
)


def whatif(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of torch.profiler, one of each rank, or one of a single rank; they may end in .gz.",
            metavar="TRACE...",
        ),
    ],
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(REWRITES)}, or a preset such as zeropp. May be given several times."),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Rate of a node's link, such as '100 Gbit/s'; by default the traced rate. May be repeated."
        ),
    ] = None,
    traced_rate: Annotated[
        str | None,
        typer.Option(
            "--traced-rate",
            help="Rate of a node's link in the traced run; found from its collectives by default.",
        ),
    ] = None,
    traced_ranks_per_node: Annotated[
        int, typer.Option("--traced-ranks-per-node", min=1, help="Ranks of a node in the traced run.")
    ] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; as traced by default.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", min=1, help="Ranks of a node; as traced by default.")
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="File with the seconds that codecs take: written by zeropp calibrate, or one of suites/machines.",
            metavar="MACHINE.toml",
        ),
    ] = None,
    slower: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Factor by which computation takes longer than traced.")
    ] = 1.0,
    export: Annotated[
        str | None,
        typer.Option(
            help="Also write the predicted schedule as traces in torch.profiler's format, one of each rank: {rank} in "
            "the name becomes the rank's number. Needs one policy and one rate.",
            metavar="FILE.json",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, for other programs.")
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print everything as CSV, for other programs.")
    ] = False,
) -> None:
    """Predict the step of a program that torch.profiler has traced, under another policy, link or topology.

    The program is any training with FSDP2, DDP or DeepSpeed; it needs no change but the profiler.
    """
    if as_json and as_csv:
        raise Refusal("--json and --csv exclude each other: give one of them")
    if len(traces) > MOST_RANKS:
        raise Refusal(f"{len(traces)} traces are given, but at most {MOST_RANKS} are read: give fewer")
    rates = [_rate("--rate", text) for text in rate or []]
    given = None if traced_rate is None else _rate("--traced-rate", traced_rate)
    if export is not None:
        exporting.check(export, max(1, len(policy or ())) * max(1, len(rates)))
    calibrated = None if machine is None else machine_file.read(machine)
    traced = joint.join(map(kineto.read, traces), traced_ranks_per_node, given)
    errors = check_replay(traced)
    topology = target_topology(traced, nodes, ranks_per_node)
    if topology.world > MOST_PREDICTED:
        raise Refusal(
            f"--nodes x --ranks-per-node is {topology}: at most {MOST_PREDICTED:,} ranks are predicted; lower one of "
            "them"
        )
    factor = slower * _shared(calibrated, traced.topology, topology)
    targets = [
        Target(name, at, topology, calibrated, factor)
        for name in policy or [SAME]
        for at in rates or [traced.rate]
    ]
    files = {} if export is None else exporting.paths(export, traced, targets[0])
    predictions = [predict(traced, target) for target in targets]
    if files:
        interrupts.take_over()  # so that Ctrl-C removes the unfinished files
        exporting.write(files, traced, predictions[0])
    rows, lines = [row(prediction) for prediction in predictions], about(traced, errors)
    if as_json:
        exported = {"exported": [*map(str, files.values())]} if files else {}
        print(json.dumps({"about": lines, "predictions": rows, **exported}, indent=2))
        return
    if as_csv:
        sys.stdout.write(plan_rows.as_csv(rows))
        return
    fits = ""
    if calibrated is not None:
        count = len(calibrated.fits)
        fits = (
            f", over all {count} fits of the machine file"
            if count > 1
            else "; the machine file states one fit"
        )
    out = terminal_table.console()
    for line in lines:
        terminal_table.say(line, out)
    terminal_table.show(rows, _COLUMNS, out, whole="--json and --csv print all of them")
    terminal_table.say(
        "from, to: the step if a collective's overhead scales with its bytes over the rate, and if it is constant"
        f"{fits}. Speed-up: over the program as traced, at the same rate and topology, with its interval. "
        "Break-even: above this rate the policy does not pay.",
        out,
    )
    if any(map(_undecided, rows)):
        terminal_table.say("?: the interval includes 1, so that it is not known which is faster.", out)
    for note in dict.fromkeys(f"{one['policy']}: {one['notes']}." for one in rows if one["notes"]):
        terminal_table.say(note, out)
    if files:
        terminal_table.say(exporting.in_words(files, targets[0]), out)


def _rate(option: str, text: str) -> float:
    """Parse the value of a command-line option that is a rate, and return the rate in bytes a second.

    Args:
        option: Name of the option, for the error message.
        text: The value, such as ``100 Gbit/s``.

    Raises:
        Refusal: If the text is no rate from 1 kbit/s to 100,000 Gbit/s.
    """
    try:
        mbit = parse_rate(text)
    except ValueError:
        mbit = None
    if mbit is None:
        raise Refusal(
            f"{option} {text!r}: expected a rate from 1 kbit/s to 100,000 Gbit/s, such as '100 Gbit/s'"
        )
    return mbit * 1.25e5


def _shared(machine: Machine | None, traced: Topology, target: Topology) -> float:
    """Return the factor by which computation slows down because more ranks share the processors than when traced.

    A factor of 2 means that computation takes twice as long as in the trace.  The factor is below 1 if fewer ranks
    share a processor than in the traced run.  It is 1 if ranks share no processors in either run.

    Args:
        machine: The machine.  None if no machine file was given; the factor is then 1.
        traced: Nodes and ranks per node of the traced run.
        target: Nodes and ranks per node of the predicted run.
    """
    if machine is None:
        return 1.0
    before, after = (machine.stretch(one.nodes, one.ranks_per_node) for one in (traced, target))
    return after / before
