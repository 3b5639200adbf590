"""``zeropp``: new, plan, run, trace, show, report, archive, compare, train, bench, check, doctor, export, ...

A suite file says what happens; there is no option that it could state.  What cannot be done is one line on
standard error and exit status 2, and nothing is touched.  torch is imported only by commands that need it.
"""

from __future__ import annotations

from harness.cluster import interrupts

# isort: split
import inspect
import json
import os
import re
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
from impl import regular_file
from impl.checkpoint.commit import CheckpointError, named, resolve
from impl.checkpoint.manifest import read_manifest
from impl.codecs.codec import CodecError, Dtype
from report import command as report_command
from report.command import RESULTS, ResultsFolder

OK: Final = 0
SOME_FAILED: Final = 1
_FOLLOW_SECONDS: Final = 1.0

app = typer.Typer(
    name="zeropp",
    help="ZeRO-3 against ZeRO++: a suite file in, a report out.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options where lines are short
)


def _show_bench(record: Path | None) -> None:
    if record is not None:
        from report.bench_page import show_run

        show_run(record)


bench.app.command("formats")(lab.formats)
app.add_typer(bench.app, name="bench", result_callback=_show_bench)
app.add_typer(check.app, name="check")
app.command(name="train")(train_command.train)
app.command()(lab.snapshot)
app.command()(report_command.report)
app.command("archive")(report_command.archive_records)
app.command()(report_command.bundle)
app.command()(report_command.compare)

SuiteFile = Annotated[Path, typer.Argument(help="Suite file in TOML.", metavar="SUITE.toml")]
MachineFile = Annotated[
    Path | None,
    typer.Option(
        help="What zeropp calibrate wrote, or a published one: predict seconds.", metavar="MACHINE.toml"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print all of it for programs, as JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print all of it for programs, as CSV.")]


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


@app.command()
def plan(file: SuiteFile, *, machine: MachineFile = None, as_json: Json = False, as_csv: Csv = False) -> None:
    """Predict every trial's bytes and memory; status 1, after the reasons, if some cannot run here.

    With --machine also the seconds of a step, as modelled from what that machine achieves.
    """
    calibrated = None if machine is None else machine_file.read(machine)
    suite = load(file)
    local = launchers.slurm_cluster(suite.trials) is None  # else on nodes that are not known yet
    forecasts = forecast(suite.trials, this_host() if local else feasibility.any_host())
    impossible = sum(bool(planned.problems) for planned in forecasts)
    table = plan_rows.rows(forecasts, calibrated)
    whole = plan_rows.plan_json(suite, forecasts, table)
    if not _print_rows(table, whole, as_json=as_json, as_csv=as_csv):
        out = terminal_table.console()
        terminal.plan(suite, forecasts, out, calibrated)
        terminal_table.say(estimate(forecasts).sentence, out)
        if impossible:
            out.print(f"{impossible} of {len(table)} trials cannot run here: `zeropp run` refuses the suite")
    raise typer.Exit(SOME_FAILED if impossible else OK)


@app.command()
def new(name: Annotated[str, typer.Argument(help="Of the suite, and of its file.", metavar="NAME")]) -> None:
    """Write NAME.toml: a suite for this machine that ends in five minutes, with further axes as comments."""
    from harness import new_suite

    path, time_sentence = new_suite.write(name, this_host())
    terminal_table.say(time_sentence, terminal_table.console(stderr=True))
    print(path)


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(help="Written; other commands' --machine.", metavar="MACHINE.toml")],
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure what this machine achieves, in two minutes, for predictions of steps."""
    if not file.absolute().parent.is_dir():
        raise Refusal(f"{file}: there is no folder {file.absolute().parent}")
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
    machine: MachineFile = None,
    sweeps: Annotated[int, typer.Option(min=1, help="How often the whole sweep shall have run.")] = 1,
    only: Annotated[str | None, typer.Option(help="Run this trial of the suite alone.", metavar="ID")] = None,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Run all failed trials again, not only those that were killed."),
    ] = False,
    report: Annotated[bool, typer.Option(help="Draw the report in the end, or leave it.")] = True,
) -> None:
    """Run a suite's missing trials, then build its report and print the report's path.

    On a cluster the launcher starts this on every host; the first one's writes records and report.
    """
    calibrated = None if machine is None else machine_file.read(machine)
    if calibrated is not None and machine is not None:
        machine_file.check_host(machine, calibrated, machine_facts.identity())
    suite = load(file)
    trials = [trial for number in range(sweeps) for trial in suite.sweep(number)]
    if len(trials) > MOST_TRIALS:
        count = f"{len(trials)} trials; at most {MOST_TRIALS} are allowed in one folder"
        raise Refusal(f"--sweeps {sweeps}: {count}")
    if only is not None:
        trials = [suite.trial_by_prefix(only, sweeps)]
    if (cluster := launchers.slurm_cluster(suite.trials)) is not None:
        check_feasible(file, forecast(trials, feasibility.any_host()))
        options = ["--sweeps", str(sweeps), *(["--only", only] if only is not None else [])]
        options += [*["--retry-failed"] * retry_failed, *["--no-report"] * (not report)]
        _to_slurm(suite, file, results, cluster, options)
        raise typer.Exit(OK)
    place = _place(suite)
    folder = results / suite.name
    records = feasibility.check_folder(folder)
    known = suite.all_repeats(max(sweeps, *(1 + record.sweep for record in records))) if records else {}
    feasibility.check_inputs(folder, [*known.values()])
    check_feasible(file, forecast(suite.trials if only is None else trials, this_host()))
    user_codecs = check.check_laws(trials)

    from harness.runs.further_repeats import Batch, batches, seconds_in
    from harness.runs.sweep import run_sweep

    interrupts.take_over()
    progress, count = terminal_table.console(stderr=True), counted(len(suite.trials), "trial")
    counts, by_sweep = (f"{sweeps} sweeps of {count}", " (each)") if sweeps > 1 else (count, "")
    say = partial(terminal_table.say, out=progress)
    say(f"{suite.name}: {suite.question}")
    say(f"{counts} ({suite.repeats}) into {folder}. Stated time{by_sweep}: {suite.time}.")
    say("" if only is None else f"Of them {only} alone.")
    say(f"The declared laws of {', '.join(user_codecs)} hold." if user_codecs else "")
    if others := len({record.id for record in records} - known.keys()):
        foreign = f"{counted(others, 'record')} that this suite does not ask for"
        say(f"This folder also holds {foreign}; the report draws them too.")
    sweep = batches(suite, sweeps, seconds_in(folder)) if only is None else [Batch(0, tuple(trials))]
    with launchers.lead_nodes(place, suite.trials) as nodes:
        outcome = run_sweep(
            suite, sweep, folder, progress,
            nodes=nodes, retry_failed=retry_failed, total=len(trials), on=calibrated,
        )  # fmt: skip
        status = INTERRUPTED if outcome.interrupted else SOME_FAILED if outcome.failed else OK
        if report and status != INTERRUPTED:
            report_command.build_report(folder, head=True)
        if nodes is not None:
            nodes.status = status
    raise typer.Exit(status)


@app.command()
def trace(
    file: SuiteFile,
    identity: Annotated[str, typer.Argument(help="Of the trial, or its beginning.", metavar="ID")],
    results: ResultsFolder = RESULTS,
) -> None:
    """Run one step of a trial and write what every rank did in it, as a Chrome trace and as a picture.

    They are written beside the records of the suite, whose report shows the first rank's step.
    """
    suite = load(file)
    trial = suite.trial_by_prefix(identity)
    check_feasible(file, forecast([trial], this_host()))

    from harness.bench.trace import summary, write_trace
    from report.figures import trace_picture

    interrupts.take_over()
    path, ranks = write_trace(trial, results / suite.name)
    print(f"{trial.strategy}, {trial.topology()}: {summary(ranks)}")
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
        bool, typer.Option("--follow", help="Print each record of a suite file as it is written.")
    ] = False,
    as_script: Annotated[
        bool, typer.Option("--reproduce", help="Of one trial: print the shell script that runs it again.")
    ] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Print one record, or all records of a suite as a table."""
    out = terminal_table.console()
    if follow:
        _follow(load(Path(suite_or_id)), results, out)
        return
    folder = None if as_script else report_command.folder_of(suite_or_id, results)
    if folder is None:
        path = _record(suite_or_id, results)
        record = read(path)
        if as_script and record.run is None:
            raise Refusal(f"{path}: names no file of its run, for it was written before there were any")
        if as_script:
            script = reproduce.script(record, run_record.read(path.parent, record.run or ""))
            print(
                visible(script) if sys.stdout.isatty() else script, end=""
            )  # exact for a shell that reads it
        else:
            whole = json.loads(regular_file.read_text(path))
            if not _print_rows(plan_rows.record_rows([record]), whole, as_json=as_json, as_csv=as_csv):
                terminal.single_record(record, out, path.parent)
    elif bench_record.holds(folder):
        from report.bench_page import show as show_bench

        show_bench(bench_record.read_all(folder), out)
    else:
        records, broken = read_valid(folder)
        if not records and not broken:
            raise Refusal(f"{folder}: no records in it; `zeropp run` writes them")
        if records and not _print_rows(plan_rows.record_rows(records), as_json=as_json, as_csv=as_csv):
            terminal.records(records, out, folder)
        if broken:
            raise RecordError(f"{broken[0]}{f' (and {len(broken) - 1} more)' if broken[1:] else ''}")


@app.command()
def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="Suite file whose cluster's nodes to compare.", metavar="SUITE.toml")
    ] = None,
    *,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List what this machine has and lacks; with a suite, what the nodes of its cluster have.

    For a cluster with a launcher, start it as `zeropp run`: the first node prints the facts of all nodes,
    side by side.
    """
    from harness.doctor import compare, examine

    if file is None:
        facts = examine()
        if not _print_rows(facts, as_json=as_json, as_csv=as_csv):
            terminal.findings(facts, terminal_table.console())
        return
    suite = load(file)
    if launchers.slurm_cluster(suite.trials) is not None:
        raise Refusal(f"{file}: start it in a job step: srun --ntasks-per-node=1 zeropp doctor {file}")
    if (place := _place(suite)) is None:
        raise Refusal(f"{file}: all its nodes are on this machine; zeropp doctor by itself looks at it")
    with launchers.lead_nodes(place, suite.trials, same_code=False) as nodes:
        assert nodes is not None  # noqa: S101  # there is a place
        table = compare(nodes.nodes)
        if not _print_rows(table, as_json=as_json, as_csv=as_csv):
            terminal.nodes(table, terminal_table.console())
        nodes.status = OK


@app.command("checkpoints")
def list_checkpoints(
    folder: Annotated[Path, typer.Argument(help="A folder of checkpoints, or one.", metavar="FOLDER")],
    *,
    digests: Annotated[
        bool, typer.Option("--verify", help="Read every file, and compare its SHA-256 with the manifest's.")
    ] = False,
) -> None:
    """List checkpoints, oldest first, and what is in them; status 2 if one is broken.

    Manifests are always checked by their own digests and files by their sizes; contents of files only with
    --verify, which reads all of them.
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
        count = f" (the first of {len(broken)} that are broken)" if len(broken) > 1 else ""
        raise CheckpointError(f"{broken[0]}{count}")


@app.command("export")
def export_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder: its newest.")],
    out: Annotated[Path, typer.Argument(help="The file to write.", metavar="OUT.safetensors")],
    dtype: Annotated[Dtype, typer.Option(help="Type of the parameters.")] = "fp32",
    *,
    allow_overflow: Annotated[
        bool, typer.Option("--allow-overflow", help="Write values beyond the type's largest as infinity.")
    ] = False,
) -> None:
    """Write a checkpoint's model as one safetensors file; on one process, without the model.

    Finite values that the type cannot hold are refused, by the names of their parameters; values that became
    0 in it, and values that are not finite in the checkpoint either, are counted on standard error.
    """
    from impl.checkpoint.full_state import export

    interrupts.take_over()
    for note in export(checkpoint, out, dtype=dtype, allow_overflow=allow_overflow):
        print(f"note: {visible(note)}", file=sys.stderr)
    print(out)


def _print_rows(
    table: Sequence[dict[str, Any]], whole: dict[str, Any] | None = None, *, as_json: bool, as_csv: bool
) -> bool:
    """Print rows as CSV, or ``whole`` as JSON, if an option says so; return whether one does."""
    if as_json and as_csv:
        raise Refusal("--json and --csv: expected at most one of them")
    if as_json:
        print(json.dumps(whole or table, indent=1))
    elif as_csv:
        print(plan_rows.as_csv(table), end="")
    return as_json or as_csv


def _follow(suite: Suite, results: Path, out: Console) -> None:
    """Print the outcome of each trial of a suite's first sweep, as soon as its record is written."""
    from harness.runs.further_repeats import batches, seconds_in
    from harness.runs.progress import outcome

    folder, total = results / suite.name, 0
    for batch in batches(suite, 1, seconds_in(folder)):
        done, total = total, total + len(batch.trials)
        for number, trial in enumerate(batch.trials, done + 1):
            path = path_of(folder, trial.id)
            while not path.exists() or (text := outcome(read(path))).startswith("interrupted: "):
                time.sleep(_FOLLOW_SECONDS)
            out.print(f"[{number}/{total}] {trial.id} {text}", markup=False, highlight=False, soft_wrap=True)


def _place(suite: Suite) -> Place | None:
    """The first node's place in a run across hosts; another node is a supervisor, and exits after the run."""
    place = launchers.place(suite.trials)
    if place is not None and place.follows:
        from harness.runs.rank_trial import WORKS

        raise typer.Exit(node_supervisors.follow(place, WORKS, run_environment.identity()))
    return place


def _to_slurm(suite: Suite, file: Path, results: Path, cluster: Cluster, options: Sequence[str]) -> None:
    """Submit a suite's run with these options to Slurm; inside a job, start its step instead."""
    arguments = ["run", str(file.absolute()), "--results", str(results.absolute()), *options]
    if "SLURM_JOB_ID" in os.environ:
        slurm.step(arguments, cluster.nodes)
    folder = results / suite.name
    number = slurm.submit(arguments, cluster, suite.name, folder)
    print(f"Slurm job {number}: {counted(len(suite.trials), 'trial')} into {folder}", file=sys.stderr)
    print(f"zeropp show {file} --results {results} --follow", file=sys.stderr)


def _record(trial_id: str, results: Path) -> Path:
    """The path of the record with an id that starts with ``trial_id``."""
    paths = sorted(results.glob(f"*/{trial_id}*.json")) if re.fullmatch("[0-9a-f]{4,12}", trial_id) else []
    if not paths:
        suites = f"{results} holds {report_command.suites_in(results)}"
        raise Refusal(f"unknown suite or id {trial_id!r}: {suites}; an id is at least 4 of its 12 hex digits")
    if len({path.stem for path in paths}) > 1:
        raise Refusal(f"id {trial_id!r} is not unique: {', '.join(path.stem for path in paths)}")
    return paths[0]


def _keep_whole(group: typer.Typer) -> None:
    """Print the first lines of a group's commands whole in its help, which cuts them to the terminal."""
    for command in group.registered_commands:
        command.short_help = (inspect.getdoc(command.callback) or "").partition("\n\n")[0]
    for inner in group.registered_groups:
        assert inner.typer_instance is not None  # noqa: S101  # each was added with one
        inner.short_help = inner.typer_instance.info.help
        _keep_whole(inner.typer_instance)


_keep_whole(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with ``arguments``, or the process's own, and return the exit status: 0; 1 if
    trials failed or, planned, cannot run here; 2 for bad input; 130 after Ctrl-C.
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
    finally:  # the process ends: a Ctrl-C has nothing left to interrupt
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
        if not hasattr(error, "format_message"):  # a usage error; its class has moved between versions
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "zeropp"
        return _complain(f"{error.format_message()} ({command} --help lists what there is)", REFUSED)
    if status == INTERRUPTED:  # by typer, after Ctrl-C
        return _complain("interrupted", INTERRUPTED)
    return status if isinstance(status, int) else OK


def _flushed(status: int) -> int:
    """Write what standard output still buffers; if the device is full, say so and return status 2.

    What cannot be written goes to the null device afterwards.  Otherwise the interpreter would try once
    more while it ends, fail, and print a message of its own with status 120.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        _discard_output()
    except OSError as error:
        _discard_output()
        return status if status == REFUSED else _complain(f"cannot go on: {error.strerror}", REFUSED)
    return status


def _discard_output() -> None:
    """Let standard output's descriptor lead to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _make_printable() -> None:
    """Let standard output and error take any character, and be there; what was closed is nowhere."""
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
