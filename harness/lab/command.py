"""The commands ``zeropp snapshot`` and ``zeropp bench formats``.  torch is imported only when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from harness import terminal_table
from harness.csv_cells import safe_cells
from harness.errors import Refusal
from harness.suites.suite_file import load
from harness.terminal_table import Column

Several = list[str] | None
_STEPS: Final = (0, 20, 50)  # steps saved by default; steps that the trial does not have are left out
_COLUMNS: Final = (
    Column("values", always=True),
    Column("codec", always=True),
    Column("bits", form=".2f"),
    Column("vnmse", "vNMSE", ".3g"),
    Column("bias", form="+.2g"),
    Column("cosine", form=".5f"),
    Column("gb_per_second", "GB/s, both ways", ".2g"),
)


def snapshot(
    file: Annotated[Path, typer.Argument(help="Suite file in TOML.", metavar="SUITE.toml")],
    identity: Annotated[str, typer.Argument(help="The trial's id, or the beginning of it.", metavar="ID")],
    out: Annotated[
        Path, typer.Option("--out", help="File to write. Default: ID.safetensors.", show_default=False)
    ] = Path(),
    steps: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Optimizer step to save, counted from 0; may be given several times. Default: 0, 20 and 50, as far "
            "as the trial has them.",
        ),
    ] = None,
) -> None:
    """Save a trial's weights and every rank's gradients at chosen steps, as input for zeropp bench formats."""
    from harness.lab.snapshot import take

    trial = load(file).trial_by_prefix(identity)
    path = Path(f"{trial.id}.safetensors") if out == Path() else out
    if path.exists() and not path.is_file():
        raise Refusal(f"--out {path}: exists, but is not a regular file; name the file to write")
    if not path.absolute().parent.is_dir():
        raise Refusal(
            f"--out {path}: there is no folder {path.absolute().parent}; make it, or name another file"
        )
    progress = terminal_table.console(stderr=True)
    chosen = sorted({*(steps or (step for step in _STEPS if step < trial.warmup + trial.steps))})
    take(trial, chosen, path, lambda line: progress.print(line, markup=False))
    print(path)


def formats(
    file: Annotated[
        Path,
        typer.Argument(
            help="A file written by zeropp snapshot, or any safetensors file.", metavar="FILE.safetensors"
        ),
    ],
    *,
    codec: Annotated[
        Several,
        typer.Option(help="Codec in its text form; may be given several times. Default: 22 common codecs."),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            help="Also choose a codec for each unit, so that elements take at most this many bits on average and "
            "the sum of errors is small.",
            min=0.1,
            max=64,
        ),
    ] = None,
    losses: Annotated[
        Path | None,
        typer.Option(
            help="Results folder or archive of a suite: also report the rank correlation between the errors of "
            "codecs and the losses in these results."
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print the whole table as CSV, for other programs.")
    ] = False,
) -> None:
    """Rank codecs by their errors on real weights and gradients, without training."""
    from harness.lab import formats as lab
    from impl.codecs.codec import parse

    if as_csv and (bits is not None or losses is not None):
        option = "--bits" if bits is not None else "--losses"
        raise Refusal(
            f"--csv prints the table alone, and {option} adds lines below it: remove one of the two"
        )
    texts = list(dict.fromkeys(str(parse(text)) for text in codec or lab.CODECS))
    units, sizes = lab.units_of(file)
    measured = lab.measure(units, sizes, texts)
    codecs = lab.rank_codecs(measured)
    lines = list(lab.budget_lines(measured, bits)) if bits is not None else []
    if losses is not None:
        ranking = lab.agreement(codecs, losses)
        interval = f"{ranking.low:.2f} to {ranking.high:.2f}, over {ranking.seeds} seeds"
        lines.append(
            f"The rank correlation between the errors of gradients and the losses in {losses}, over "
            f"{ranking.codecs} codecs, is {ranking.correlation:.2f} ({interval})."
        )
    table = codecs.rename(columns={"kind": "values"})[[column.key for column in _COLUMNS]].round({"bits": 3})
    if as_csv:
        print(safe_cells(table).to_csv(index=False), end="")
        return
    out = terminal_table.console()
    rows: list[dict[str, Any]] = table.to_dict("records")  # type: ignore[assignment]  # keys are names
    terminal_table.show(rows, _COLUMNS, out, whole="--csv prints all of them")
    lossless = ", ".join(f"{kind} {lab.lossless_bits(units, kind):.2f}" for kind in codecs["kind"].unique())
    note = f"Bits of a bf16 element whose exponent an ideal coder compresses without loss: {lossless}."
    for line in [note, *lines]:
        terminal_table.say(line, out)
