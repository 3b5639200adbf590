"""``zeropp snapshot`` and ``zeropp bench formats``.  torch is imported only once a command runs."""

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
_STEPS: Final = (0, 20, 50)  # kept by default, as far as a trial goes
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
    identity: Annotated[str, typer.Argument(help="Of a trial, or its beginning.", metavar="ID")],
    out: Annotated[Path, typer.Option("--out", help="Written; by default ID.safetensors.")] = Path(),
    steps: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Of the optimizer, from 0. Default: 0, 20 and 50 of those there are."),
    ] = None,
) -> None:
    """Keep a trial's weights and every rank's gradients before chosen steps, for bench formats."""
    from harness.lab.snapshot import take

    trial = load(file).trial_by_prefix(identity)
    path = Path(f"{trial.id}.safetensors") if out == Path() else out
    if not path.absolute().parent.is_dir():
        raise Refusal(f"{path}: there is no folder {path.absolute().parent}")
    progress = terminal_table.console(stderr=True)
    chosen = sorted({*(steps or (step for step in _STEPS if step < trial.warmup + trial.steps))})
    take(trial, chosen, path, lambda line: progress.print(line, markup=False))
    print(path)


def formats(
    file: Annotated[
        Path, typer.Argument(help="Of zeropp snapshot, or your own.", metavar="FILE.safetensors")
    ],
    *,
    codec: Annotated[Several, typer.Option(help="Its text form, several times. Default: 20 of them.")] = None,
    bits: Annotated[
        float | None, typer.Option(help="Also choose codecs by unit within a mean.", min=0.1)
    ] = None,
    losses: Annotated[
        Path | None, typer.Option(help="Results folder: how well do errors rank codecs as its losses do?")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all of it for programs, as CSV.")] = False,
) -> None:
    """Rank codecs by their errors on real weights and gradients, without training."""
    from harness.lab import formats as lab
    from impl.codecs.codec import parse

    texts = list(dict.fromkeys(str(parse(text)) for text in codec or lab.CODECS))
    units, sizes = lab.units_of(file)
    measured = lab.measure(units, sizes, texts)
    codecs = lab.rank_codecs(measured)
    lines = list(lab.budget_lines(measured, bits)) if bits is not None else []
    if losses is not None:
        ranking = lab.agreement(codecs, losses)
        interval = f"{ranking.low:.2f} to {ranking.high:.2f}, over {ranking.seeds} seeds"
        lines.append(
            f"Errors of gradients rank {ranking.codecs} codecs as the losses of {losses} do with a rank "
            f"correlation of {ranking.correlation:.2f} ({interval})."
        )
    table = codecs.rename(columns={"kind": "values"})[[column.key for column in _COLUMNS]].round({"bits": 3})
    if as_csv:
        print(safe_cells(table).to_csv(index=False), end="")
        return
    out = terminal_table.console()
    rows: list[dict[str, Any]] = table.to_dict("records")  # type: ignore[assignment]  # keys are names
    terminal_table.show(rows, _COLUMNS, out, whole="--csv has all")
    lossless = ", ".join(f"{kind} {lab.lossless_bits(units, kind):.2f}" for kind in codecs["kind"].unique())
    for line in [f"Bits in bf16 with exponents coded without loss, at best: {lossless}.", *lines]:
        terminal_table.say(line, out)
