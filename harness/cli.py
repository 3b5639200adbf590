"""The command line ``zeropp``: parses arguments, calls the part of the program that does the work, and prints.

A suite file describes an experiment completely, so no option repeats what a suite file can state.  A request
that cannot be met is refused with one line on standard error and exit status 2, before anything is written.
Commands import torch inside their functions, so that commands without torch start fast.
"""

from __future__ import annotations

from harness.cluster import interrupts  # first: Ctrl-C during the imports below is then handled

# isort: split
import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from harness import plan_rows, terminal, terminal_table
from harness.bench import command as bench
from harness.cluster import node_supervisors
from harness.cluster.control_channel import Place
from harness.cluster.interrupts import INTERRUPTED, REFUSED
from harness.cluster.rank_processes import LaunchError, end_if_in_group
from harness.errors import LinkError, Refusal, check_installed, not_imported, one_line, visible
from harness.expected_time import estimate
from harness.lab import command as lab
from harness.laws import command as check
from harness.measure import machine as machine_facts
from harness.measure import machine_file, run_environment
from harness.print_once import speaks
from harness.records import bench_record, reproduce, run_record
from harness.records.trial_record import RecordError, path_of, read, read_valid
from harness.runs import feasibility, launchers, slurm
from harness.runs.feasibility import check_feasible, forecast, this_host
from harness.suites.expand_suite import MOST_TRIALS
from harness.suites.labels import counted
from harness.suites.suite import Suite, SuiteError
from harness.suites.suite_file import load
from harness.suites.trial import Cluster
from harness.train import command as train_command
from harness.whatif import command as whatif_command
from harness.whole_file import is_hidden
from impl import named_object, regular_file
from impl.checkpoint.commit import CheckpointError, named, resolve
from impl.checkpoint.manifest import read_manifest
from impl.codecs.codec import CodecError, Dtype
from report import command as report_command
from report.command import RESULTS, ResultsFolder

OK: Final = 0
SOME_FAILED: Final = 1
_FOLLOW_SECONDS: Final = 1.0
_ONE_OCCASION: Final = (
    "Sweeps on one start of the machine, each within an hour of the one before, are one occasion, and intervals hold "
    "only for this occasion. For a further occasion, restart the machine, use another machine, or wait an hour, and "
    "run this command again"
)
# Commands that may import and call what a suite names; in all others such an import raises.
_RUNNING: Final = frozenset(("run", "train", "trace", "snapshot", "check", "bench", "audit"))

app = typer.Typer(
    name="zeropp",
    help="Compare ZeRO-3 with ZeRO++: run the trials of a suite file, and report what they measured.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would print tables that cut the names of options on narrow terminals
)


def _show_bench(record: Path | None) -> None:
    if record is not None:
        from report.bench_page import show_run

        show_run(record)


bench.app.command("formats")(lab.formats)
app.add_typer(bench.app, name="bench", result_callback=_show_bench)
app.add_typer(check.app, name="check")
app.command(name="train")(train_command.train)
app.command()(whatif_command.whatif)
app.command()(lab.snapshot)
app.command()(report_command.report)
app.command("archive")(report_command.archive_records)
app.command()(report_command.bundle)
app.command()(report_command.compare)

SuiteFile = Annotated[Path, typer.Argument(help="Suite file in TOML.", metavar="SUITE.toml")]
MachineFile = Annotated[
    Path | None,
    typer.Option(
        help="Machine file, written by zeropp calibrate or taken from suites/machines: also predict the seconds of a "
        "step on the machine that it describes.",
        metavar="MACHINE.toml",
    ),
]
OwnMachineFile = Annotated[
    Path | None,
    typer.Option(
        "--machine",
        help="Machine file that zeropp calibrate wrote on this machine: also predict the seconds of a step.",
        metavar="MACHINE.toml",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON, for other programs.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print everything as CSV, for other programs.")]


@app.callback(invoke_without_command=True)
def _entry(
    context: typer.Context,
    *,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        print(version("zeropp-bench"))
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print(context.get_help())
    elif context.invoked_subcommand not in _RUNNING | {"plan"}:
        context.with_resource(named_object.forbidden())


@app.command()
def plan(
    file: SuiteFile,
    *,
    machine: MachineFile = None,
    imports: Annotated[
        bool,
        typer.Option(
            "--import", help="Import and call the modules that the suite names, to learn their sizes."
        ),
    ] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Predict the bytes sent and the memory of every trial, without running a trial.

    The exit status is 1 if some trials cannot run on this machine; the reasons are printed below the
    table.  With --machine, the seconds of a step are predicted too.  Without --import, the modules that the
    suite names are not imported, and a line says which numbers are missing for that reason.
    """
    calibrated = None if machine is None else machine_file.read(machine)
    with contextlib.nullcontext() if imports else named_object.forbidden():
        suite = load(file)
        local = launchers.slurm_cluster(suite.trials) is None  # Slurm's nodes are not known yet
        forecasts = forecast(suite.trials, this_host() if local else feasibility.any_host())
    impossible = sum(bool(planned.problems) for planned in forecasts)
    table = plan_rows.rows(forecasts, calibrated)
    whole = plan_rows.plan_json(suite, forecasts, table)
    missing = plan_rows.not_imported(forecasts)
    if _print_rows(table, whole, as_json=as_json, as_csv=as_csv):
        terminal_table.say(missing, terminal_table.console(stderr=True))
    else:
        out = terminal_table.console()
        terminal.plan(suite, forecasts, out, calibrated)
        terminal_table.say(missing, out)
        terminal_table.say(estimate(forecasts).sentence, out)
        if impossible:
            out.print(f"{impossible} of {len(table)} trials cannot run here: `zeropp run` refuses the suite")
    raise typer.Exit(SOME_FAILED if impossible else OK)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the suite and of its file.", metavar="NAME")],
) -> None:
    """Write NAME.toml, a first suite, sized to take less than five minutes on this machine.

    The suite compares ZeRO++ with ZeRO-3.  The file also has commented lines for other settings, such as the number of
    nodes: remove the # before a line to compare several values of this setting.
    """
    from harness import new_suite

    path, time_sentence = new_suite.write(name, this_host())
    terminal_table.say(time_sentence, terminal_table.console(stderr=True))
    print(path)


@app.command()
def calibrate(
    file: Annotated[
        Path,
        typer.Argument(
            help="File to write; zeropp plan and zeropp run take it as --machine.", metavar="MACHINE.toml"
        ),
    ],
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure this machine for two minutes, so that the seconds of a step can be predicted."""
    if file.exists() and not file.is_file():
        raise Refusal(f"{file}: exists, but is not a regular file; name the file to write")
    if not file.absolute().parent.is_dir():
        raise Refusal(f"{file}: there is no folder {file.absolute().parent}; make it, or name another file")
    feasibility.check_writable(file.absolute().parent, f"{file}: its folder")

    from harness.bench import calibration

    interrupts.take_over()
    machine_file.write(file, calibration.calibrate(file.stem, results, terminal_table.console(stderr=True)))
    print(file)


@app.command()
def run(
    file: SuiteFile,
    results: ResultsFolder = RESULTS,
    *,
    machine: OwnMachineFile = None,
    sweeps: Annotated[
        int, typer.Option(min=1, help="Run until the folder holds this many sweeps of the whole suite.")
    ] = 1,
    only: Annotated[
        str | None, typer.Option(help="Run only the trial whose id begins with ID.", metavar="ID")
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="Run all failed trials again. Without it, a failed trial runs again only if its failure may not "
            "happen again, for example because the trial was killed.",
        ),
    ] = False,
    report: Annotated[bool, typer.Option(help="Whether to build the report after the last trial.")] = True,
) -> None:
    """Run the trials of a suite that have no record yet, then build the suite's report and print its path.

    On a cluster, the launcher starts this command on every host.  Only the first host writes records and the
    report.
    """
    calibrated = None if machine is None else machine_file.read(machine)
    if calibrated is not None and machine is not None:
        machine_file.check_host(machine, calibrated, machine_facts.identity())
    suite = load(file)
    if (total := sweeps * len(suite.trials)) > MOST_TRIALS:  # before they are made
        raise Refusal(
            f"--sweeps {sweeps} makes {total} trials, but at most {MOST_TRIALS} are allowed in one folder: "
            "ask for fewer sweeps"
        )
    trials = [trial for number in range(sweeps) for trial in suite.sweep(number)]
    if only is not None:
        trials = [suite.trial_by_prefix(only, sweeps)]
    if (cluster := launchers.slurm_cluster(suite.trials)) is not None:
        check_feasible(file, forecast(trials, feasibility.any_host()))
        options = ["--sweeps", str(sweeps), *(["--only", only] if only is not None else [])]
        options += ["--machine", str(machine.absolute())] if machine is not None else []
        options += [*["--retry-failed"] * retry_failed, *["--no-report"] * (not report)]
        _to_slurm(suite, file, results, cluster, options)
        raise typer.Exit(OK)
    place = _place(suite)
    folder = results / suite.name
    records = feasibility.check_folder(folder)
    latest = max(records, key=lambda record: record.sweep, default=None)
    last = 0 if latest is None else latest.sweep
    if latest is not None and last >= MOST_TRIALS:
        raise Refusal(
            f"{path_of(folder, latest.id)}: this record belongs to sweep {last + 1}, but sweeps have numbers up to "
            f"{MOST_TRIALS}; delete this record"
        )
    known = suite.all_repeats(max(sweeps, 1 + last)) if records else {}
    feasibility.check_inputs(folder, known, records)
    check_feasible(file, forecast(suite.trials if only is None else trials, this_host()))
    user_codecs = check.check_laws(trials)

    from harness.runs.further_repeats import batches, single, timings_in
    from harness.runs.sweep import run_sweep

    interrupts.take_over()
    progress, count = terminal_table.console(stderr=True), counted(len(suite.trials), "trial")
    counts, by_sweep = (f"{sweeps} sweeps of {count}", " (each)") if sweeps > 1 else (count, "")
    say = partial(terminal_table.say, out=progress)
    say(f"{suite.name}: {suite.question}")
    say(f"{counts} ({suite.repeats}) into {folder}. Stated time{by_sweep}: {suite.time}.")
    say(f"{_ONE_OCCASION} with --sweeps {sweeps + 1}." if sweeps > 1 and only is None else "")
    say("" if only is None else f"Only trial {only} runs.")
    say(f"The declared laws of {', '.join(user_codecs)} hold." if user_codecs else "")
    if others := len({record.id for record in records} - known.keys()):
        foreign = f"{counted(others, 'record')} of trials that this suite does not have"
        say(f"The folder also holds {foreign}; the report shows them too.")
    sweep = batches(suite, sweeps, timings_in(folder)) if only is None else [single(suite, trials[0])]
    with launchers.lead_nodes(place, suite.trials) as nodes:
        outcome = run_sweep(
            suite, sweep, folder, progress,
            nodes=nodes, retry_failed=retry_failed, total=len(trials), on=calibrated,
        )  # fmt: skip
        status = INTERRUPTED if outcome.interrupted else SOME_FAILED if outcome.failed else OK
        if report and status != INTERRUPTED:
            if suite.seconds and suite.seconds != report_command.named_seconds(folder):
                command = ["report", str(folder), "--seconds", suite.seconds, "--results", str(results)]
                say(
                    f'seconds = "{suite.seconds}" was set after the latest trial ran, so this report does not use '
                    f"it; for a page that does, run `zeropp {shlex.join(command)}`"
                )
            report_command.report_after_run(folder)
        if nodes is not None:
            nodes.status = status
    raise typer.Exit(status)


@app.command()
def trace(
    file: SuiteFile,
    identity: Annotated[str, typer.Argument(help="The trial's id, or the beginning of it.", metavar="ID")],
    results: ResultsFolder = RESULTS,
) -> None:
    """Run a trial for a few steps, and write trace files of five steps of every rank for zeropp whatif and Perfetto.

    torch.profiler records these five steps.  If our engine trains the model, the command also draws one more step as a
    picture, which the suite's report shows for the first rank.  All files are written into the suite's results folder.
    """
    suite = load(file)
    trial = suite.trial_by_prefix(identity)
    check_feasible(file, forecast([trial], this_host()))

    from harness.bench.trace import has_lanes, summary, write_trace
    from report.figures import trace_picture

    interrupts.take_over()
    path, ranks = write_trace(trial, results / suite.name)
    print(f"{trial.strategy}, {trial.topology()}: {summary(ranks)}")
    print(ranks[0].profile.parent)
    if has_lanes(trial):
        print(path)
        print(trace_picture.write(path))


@app.command()
def show(
    suite_or_id: Annotated[
        str, typer.Argument(help="Suite name or file, results folder, or trial id.", metavar="SUITE-OR-ID")
    ],
    results: ResultsFolder = RESULTS,
    *,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="With a suite file: print the outcome of each trial as soon as it is recorded."
        ),
    ] = False,
    as_script: Annotated[
        bool,
        typer.Option(
            "--reproduce", help="With a trial id: print the shell script that runs the trial again."
        ),
    ] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Print one record, or all records of a suite as a table."""
    out = terminal_table.console()
    asked = {"--follow": follow, "--reproduce": as_script, "--json": as_json, "--csv": as_csv}
    if len(given := [option for option, value in asked.items() if value]) > 1:
        raise Refusal(f"{given[0]} and {given[1]} exclude each other: give one of them")
    if follow:
        _follow(Path(suite_or_id), results, out)
        return
    folder = None if as_script else report_command.folder_of(suite_or_id, results)
    if folder is None:
        path = _record(suite_or_id, results)
        record = read(path)
        if as_script and record.run is None:
            raise Refusal(
                f"{path}: --reproduce needs the run's file (runs/*.json: suite, sources and packages), but this record "
                "was written by a version of zeropp that wrote no such file: run the trial again"
            )
        if as_script:
            script = reproduce.script(record, run_record.read(path.parent, record.run or ""))
            # On a terminal, control characters are escaped; a shell that reads the script gets it unchanged.
            print(visible(script) if sys.stdout.isatty() else script, end="")
        else:
            whole = json.loads(regular_file.read_text(path))
            if not _print_rows(plan_rows.record_rows([record]), whole, as_json=as_json, as_csv=as_csv):
                terminal.single_record(record, out, path.parent)
    elif bench_record.holds(folder):
        if as_json or as_csv:
            raise Refusal(
                f"{folder} holds a benchmark's records: {given[0]} is for records of trials; leave {given[0]} out, "
                "or read the JSON files in the folder"
            )
        from report.bench_page import show as show_bench

        show_bench(bench_record.read_all(folder), out)
    else:
        records, broken = read_valid(folder)
        if not records and not broken:
            raise Refusal(f"{folder}: there are no records in it; `zeropp run` writes them")
        if records and not _print_rows(plan_rows.record_rows(records), as_json=as_json, as_csv=as_csv):
            terminal.records(records, out, folder)
        if broken:
            raise RecordError(f"{broken[0]}{f' (and {len(broken) - 1} more)' if broken[1:] else ''}")


@app.command()
def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(help="Suite file; compare the nodes of its cluster.", metavar="SUITE.toml"),
    ] = None,
    *,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List what this machine has and what it lacks; with a suite, compare the nodes of the suite's cluster.

    To compare nodes, start this command with the same launcher as `zeropp run`.  The first node prints the
    facts of all nodes side by side, and marks the facts that differ.
    """
    from harness.doctor import compare, examine

    if file is None:
        facts = examine()
        if not _print_rows(facts, as_json=as_json, as_csv=as_csv):
            terminal.findings(facts, terminal_table.console())
        return
    suite = load(file)
    if launchers.slurm_cluster(suite.trials) is not None:
        raise Refusal(
            f"{file}: zeropp doctor does not submit Slurm jobs; run it in a job step: "
            f"srun --ntasks-per-node=1 zeropp doctor {file}"
        )
    if (place := _place(suite)) is None:
        raise Refusal(
            f"{file}: all nodes of this suite are on this machine, so there is nothing to compare; "
            "run zeropp doctor without a suite"
        )
    with launchers.lead_nodes(place, suite.trials, same_code=False) as nodes:
        assert nodes is not None  # noqa: S101  # lead_nodes yields None only without a place
        table = compare(nodes.nodes)
        if not _print_rows(table, as_json=as_json, as_csv=as_csv):
            terminal.nodes(table, terminal_table.console())
        nodes.status = OK


@app.command(context_settings={"allow_interspersed_args": False})
def audit(
    command: Annotated[
        list[str],
        typer.Argument(help="The program, as typed in a shell: torchrun train.py ...", metavar="COMMAND..."),
    ],
    *,
    steps: Annotated[
        str,
        typer.Option(
            help="Steps to report, counted from 1: 5, or 2:10, or 2: for all but the first.", metavar="STEPS"
        ),
    ] = "2:",
    model: Annotated[
        str,
        typer.Option(
            help="Function that returns the model, to count its parameters. Default: the optimizers' parameters.",
            metavar="MODULE:FUNCTION",
        ),
    ] = "",
    expect: Annotated[
        list[str] | None,
        typer.Option(
            help="What has to hold, such as 'all_gather int8 <= 0.5 M between nodes'; repeatable.",
            metavar="EXPECTATION",
        ),
    ] = None,
    expectations: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with a list of expectations: expect = ['...', ...].", metavar="FILE.toml"
        ),
    ] = None,
    step_marker: Annotated[
        str,
        typer.Option(
            help="Function whose return ends a step. Default: the first torch optimizer's step().",
            metavar="MODULE:FUNCTION",
        ),
    ] = "",
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a node. Default: as torchrun or Slurm placed them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and the CSV.", metavar="DIR")] = Path(
        "audit"
    ),
) -> None:
    """Run a program unchanged, and report the bytes, ranks and call site of each of its torch.distributed collectives.

    If the program fails, the exit status is the program's.  Otherwise the exit status is 1 if an expectation is broken
    or could not be checked, and 0 if all expectations hold.
    """
    from harness.audit import command as audits

    options = audits.options(
        command, steps=steps, expect=expect or [], file=expectations, marker=step_marker, model=model,
        ranks_per_node=ranks_per_node, folder=out,
    )  # fmt: skip
    status, found = audits.audit(options)
    if found is not None:
        from report import audit_page

        audits.show_report(found, terminal_table.console())
        audits.write_files(found, out)
        print(audit_page.write(found, out, command))
    audits.warn_unchecked(options, found)
    raise typer.Exit(audits.exit_status(status, found, len(options.expected)))


@app.command("checkpoints")
def list_checkpoints(
    folder: Annotated[
        Path, typer.Argument(help="A folder of checkpoints, or one checkpoint.", metavar="FOLDER")
    ],
    *,
    digests: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read every file and compare its SHA-256 with the one in the manifest."
        ),
    ] = False,
) -> None:
    """List checkpoints, oldest first, with a line on the contents of each.

    The digest of each manifest and the size of each file are always checked.  The contents of files are
    checked only with --verify, which has to read all files.  The exit status is 2 if a checkpoint is broken.
    """
    broken: list[CheckpointError] = []
    for path in named(folder) or [resolve(folder)]:
        text, state = "", "sizes and digests checked" if digests else "sizes checked, contents not (--verify)"
        try:
            manifest = read_manifest(path)
            optimizers = ", ".join(optimizer["kind"] for optimizer in manifest.optimizers) or "none"
            nbytes = sum(size for size, _ in manifest.files)
            text = (
                f"{train_command.steps_text(manifest)}, {manifest.numel:,} elements in "
                f"{len(manifest.parameters)} parameters, optimizers {optimizers}, {nbytes:,} bytes "
                f"in {len(manifest.files)} files, from {manifest.topology} ranks at stage "
                f"{manifest.of.get('stage')}; {manifest.writer}; "
            )
            manifest.verify(path, range(len(manifest.files)) if digests else ())
        except CheckpointError as error:
            broken.append(error)
            state = f"BROKEN: {error}"
        print(visible(f"{path}: {text}{state}".replace("\n", " ")))
    if broken:
        count = f" (the first of {len(broken)} broken checkpoints)" if len(broken) > 1 else ""
        raise CheckpointError(f"{broken[0]}{count}")


@app.command("export")
def export_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a folder of checkpoints, of which the newest is taken.")
    ],
    out: Annotated[Path, typer.Argument(help="The file to write.", metavar="OUT.safetensors")],
    dtype: Annotated[Dtype, typer.Option(help="Type in which parameters are written.")] = "fp32",
    *,
    allow_overflow: Annotated[
        bool,
        typer.Option(
            "--allow-overflow",
            help="Write values that are too large for the type as infinity, instead of refusing them.",
        ),
    ] = False,
) -> None:
    """Write the whole model of a checkpoint as one safetensors file.

    This takes one process and needs neither the model's code nor the ranks that saved the checkpoint.  The command
    refuses finite values that are too large for the type, and names their parameters.  It reports on standard
    error how many values became 0, and how many were not finite in the checkpoint itself.
    """
    from impl.checkpoint.full_state import export

    interrupts.take_over()
    for note in export(checkpoint, out, dtype=dtype, allow_overflow=allow_overflow):
        print(f"note: {visible(note)}", file=sys.stderr)
    print(out)


def _print_rows(
    table: Sequence[dict[str, Any]], whole: dict[str, Any] | None = None, *, as_json: bool, as_csv: bool
) -> bool:
    """Print a command's result as JSON or CSV, if the user has asked for one of them; return whether it was printed.

    Args:
        table: The rows to print as CSV.
        whole: The value to print as JSON; by default ``table``.
        as_json: Whether the user gave ``--json``.
        as_csv: Whether the user gave ``--csv``.

    Raises:
        Refusal: If the user gave both.
    """
    if as_json and as_csv:
        raise Refusal("--json and --csv exclude each other: give one of them")
    if as_json:
        print(json.dumps(whole or table, indent=1))
    elif as_csv:
        print(plan_rows.as_csv(table), end="")
    return as_json or as_csv


def _follow(file: Path, results: Path, out: Console) -> None:
    """Print the outcome of each trial of a suite's first sweep, in the order of the sweep.

    For a trial whose record does not exist yet, this function waits.
    """
    from harness.runs.further_repeats import batches, timings_in
    from harness.runs.progress import outcome

    suite = load(file)
    folder, total = results / suite.name, 0
    if not suite.ids_known:  # the ids depend on the alignment of the policies, which a record holds
        suite = load(file, _recorded_alignment(folder))
    for batch in batches(suite, 1, timings_in(folder)):
        done, total = total, total + len(batch.trials)
        for number, trial in enumerate(batch.trials, done + 1):
            path = path_of(folder, trial.id)
            while not path.exists() or (text := outcome(read(path))).startswith("interrupted: "):
                time.sleep(_FOLLOW_SECONDS)
            out.print(f"[{number}/{total}] {trial.id} {text}", markup=False, highlight=False, soft_wrap=True)


def _recorded_alignment(folder: Path) -> int:
    """Return the alignment of parameters and shards that a suite's records name, in elements.

    Each parameter and each shard starts at a multiple of this number of elements.  The number is the field ``align`` in
    the policy of a record.  The newest record in ``folder`` that has this field is taken.  As long as there is no such
    record, this function waits.
    """
    while True:
        for record in reversed(read_valid(folder)[0] if folder.is_dir() else []):
            if align := (record.trial.get("policy") or {}).get("align"):
                return int(align)
        time.sleep(_FOLLOW_SECONDS)


def _place(suite: Suite) -> Place | None:
    """Return this process's place in a run across hosts if it leads the run; otherwise work until the run ends.

    - If all nodes of the suite are on this machine, returns None.
    - If this process leads the run, on node 0, returns the process's :class:`Place`.  A place has the process's node,
      and says how nodes find each other.
    - If another process leads the run, this function does not return.  The first process of each node starts and
      watches the ranks of its node; further processes only wait.  When the run ends, the command ends with the run's
      exit status.
    """
    place = launchers.place(suite.trials)
    if place is not None and place.follows:
        from harness.runs.rank_trial import WORKS, admit_of

        facts = run_environment.identity()
        raise typer.Exit(node_supervisors.follow(place, WORKS, facts, admit_of(suite)))
    return place


def _to_slurm(suite: Suite, file: Path, results: Path, cluster: Cluster, options: Sequence[str]) -> None:
    """Submit a Slurm job that runs ``zeropp run`` of the suite with these options.

    If this process is already inside a Slurm job, no job is submitted, and this function does not return: the process
    is replaced by ``srun``, which starts the same command on all nodes of the job.
    """
    arguments = ["run", str(file.absolute()), "--results", str(results.absolute()), *options]
    if "SLURM_JOB_ID" in os.environ:
        slurm.step(arguments, cluster.nodes)
    folder = results / suite.name
    number = slurm.submit(arguments, cluster, suite.name, folder)
    print(f"Slurm job {number}: {counted(len(suite.trials), 'trial')} into {folder}", file=sys.stderr)
    follow = ["show", str(file), "--results", str(results), "--follow"]
    print(f"zeropp {shlex.join(follow)}", file=sys.stderr)


def _record(trial_id: str, results: Path) -> Path:
    """Return the path of the record of the trial whose id begins with ``trial_id``.

    ``results`` has a folder for each suite.  If several suites have a record of this trial, the first suite by name is
    taken.

    Raises:
        Refusal: If ``trial_id`` is not 4 to 12 hex digits, or if not exactly one recorded trial has an id that begins
            with ``trial_id``.
    """
    is_id = re.fullmatch("[0-9a-f]{4,12}", trial_id) is not None
    paths = sorted(results.glob(f"*/{trial_id}*.json")) if is_id else []
    paths = [path for path in paths if not is_hidden(path.parent)]
    if not paths:
        suites = f"{results} holds {report_command.suites_in(results)}"
        raise Refusal(
            f"unknown suite or id {trial_id!r}: {suites}; an id needs at least the first 4 of its 12 hex digits"
        )
    if len({path.stem for path in paths}) > 1:
        several = ", ".join(path.stem for path in paths)
        raise Refusal(f"id {trial_id!r} is not unique: give more digits of one of {several}")
    return paths[0]


def _keep_whole(group: typer.Typer) -> None:
    """Make the help of a command group print the whole first paragraph on each command, where typer prints one line."""
    for command in group.registered_commands:
        command.short_help = (inspect.getdoc(command.callback) or "").partition("\n\n")[0]
    for inner in group.registered_groups:
        assert inner.typer_instance is not None  # noqa: S101  # add_typer() always sets it
        inner.short_help = inner.typer_instance.info.help
        _keep_whole(inner.typer_instance)


_keep_whole(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: The words after ``zeropp``.  By default, the words with which this process was started; this
            function then also handles Ctrl-C, and a standard output that is closed or full.

    Returns:
        The exit status:

        - 0 if all went well.
        - 1 if trials failed, if planned trials cannot run here, or after an unexpected error.  Also if ``zeropp check``
          found a broken law (a property that a codec or a class declares), ``zeropp audit`` an expectation that is
          broken or could not be checked, ``zeropp compare`` a result that got worse, or ``zeropp report --check`` a
          difference.
        - 2 if the input was refused.
        - 130 after Ctrl-C.
        - ``zeropp audit`` returns the exit status of the audited program if this program fails.
    """
    if arguments is not None:
        return _main(arguments)
    _make_printable()
    interrupts.end_at_once()
    try:
        status = _flushed(_main(arguments))
    except Exception:
        traceback.print_exc()
        status = SOME_FAILED
    finally:  # the process is about to end, so a late Ctrl-C has nothing left to interrupt
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_if_in_group(status)
    return status


def _main(arguments: Sequence[str] | None) -> int:
    try:
        check_installed()
        arguments = sys.argv[1:] if arguments is None else arguments
        status = app(list(arguments), prog_name="zeropp", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except (SuiteError, RecordError, Refusal, LinkError, CheckpointError, CodecError) as error:
        return _complain(str(error), REFUSED)
    except LaunchError as error:
        line = str(error).splitlines()[0]
        status = REFUSED if error.kind == "refused" else SOME_FAILED
        return _complain(f"{line}; log {error.log}" if error.log else line, status)
    except ImportError as error:
        if (missing := not_imported(error)) is None:
            raise
        return _complain(missing, REFUSED)
    except MemoryError:
        return _complain("cannot go on: not enough memory for what was read", REFUSED)
    except OSError as error:
        return _complain(f"{error.filename or 'cannot go on'}: {error.strerror or error}", REFUSED)
    except Exception as error:
        # Usage errors have this method.  Their class is not caught by name: it has moved between versions.
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "zeropp"
        return _complain(f"{error.format_message()} ({command} --help lists what there is)", REFUSED)
    if status == INTERRUPTED:  # typer caught the Ctrl-C itself, and printed nothing
        return _complain("interrupted", INTERRUPTED)
    return status if isinstance(status, int) else OK


def _flushed(status: int) -> int:
    """Write out what is left of standard output, and return the command's exit status.

    - If the text can be written, the exit status is ``status``.
    - If a pipe's reader has closed the pipe, as ``head`` does, the exit status is ``status`` too.
    - If the text cannot be written for another reason, such as a full disk, the exit status is 2, and an error is
      printed.  If ``status`` is 2, an error has been printed before, and no second error is printed.

    Text that cannot be written is redirected to the null device.  Otherwise the interpreter would flush the text again
    while it shuts down, fail, print another message, and exit with status 120.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe, which is no error
        _discard_output()
    except OSError as error:
        _discard_output()
        return status if status == REFUSED else _complain(f"cannot go on: {error.strerror}", REFUSED)
    return status


def _discard_output() -> None:
    """Point the file descriptor of standard output at the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _make_printable() -> None:
    """Make printing to standard output and standard error safe.

    A character that the stream's encoding lacks is printed as ``?`` instead of raising an error.  A stream that the
    caller has closed is None in :mod:`sys`, and is replaced with the null device.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # until it ends
        else:
            stream.reconfigure(errors="replace")


def _complain(message: str, status: int) -> int:
    line = f"zeropp: {one_line(message)}"
    if status != REFUSED or speaks(line):
        print(line, file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
