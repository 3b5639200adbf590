"""Writes an archive for a conference's artifact evaluation: records, suite, packages, commands and verdicts."""

from __future__ import annotations

import io
import re
import shlex
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from harness.records import archive, run_record
from harness.records.trial_record import RecordError, read_all, write_whole
from harness.suites.suite import NAME
from report import page
from report.data.frames import frames_of
from report.data.metrics import derive
from report.data.text import listed
from report.verdicts import verdicts

_README: Final = """\
# {suite}

{question}

`{suite}{suffix}` holds the records: `zeropp report .` in this folder draws their page, with every figure and
table.
`sh run.sh CLONE` runs the suite again in a clone of the sources, at the commit that ran it, and compares the new
records with these. `VERDICTS.md` says what came out, what its intervals hold for, and, if the suite ran at several
occasions, within which interval a new run is expected.

{headline}

{facts}
"""
_SCRIPT: Final = """\
# sh run.sh CLONE: runs the suite again from a clone of the sources, and compares both runs; {changed}.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "${{1:?expected the folder of a clone of the sources}}"
git checkout -q {commit}
{python} -m venv .venv
.venv/bin/pip install --no-deps -r "$here"/packages.txt
.venv/bin/pip install --no-deps -e .
tar -xf "$here"/{packed} -C "$here"
.venv/bin/zeropp run "$here"/{file} --results "$here"/again
.venv/bin/zeropp compare "$here"/{suite} "$here"/again/{suite}
"""


def bundle(folder: Path, into: Path) -> Path:
    """Write ``<into>/<suite>-artifact.tar.xz`` from the records of ``folder``, and return the path of this archive.

    Raises a RecordError in these cases:

    * The folder has no records.
    * The records do not say which run wrote them, because an older version wrote the records.
    * The run does not say which suite it ran, because an older version wrote the run's file.
    * The records name a suite by a name that no suite can have, because somebody has edited them.
    * The suite names a file outside of the suite's folder, or a file that has the name of another file in the bundle.
    """
    records = read_all(folder)
    if not records:
        raise RecordError(f"{folder}: there are no records in it; `zeropp run SUITE` writes them")
    if not (runs := [record.run for record in records if record.run is not None]):
        raise RecordError(
            f"{folder}: the records do not say which run wrote them, because an older version made them; run the "
            "suite again"
        )
    suite, run = records[0].suite, run_record.read(folder, runs[-1])
    if re.fullmatch(NAME, suite) is None:
        raise RecordError(
            f"{folder}: its records were edited: they name the suite {suite!r}, and no suite can have this name; run "
            "the suite again"
        )
    if run.suite is None:
        raise RecordError(
            f"{folder}: the last run does not say which suite it ran, because an older version wrote it; "
            "run the suite again"
        )
    derived = derive(frames_of(records))
    head = verdicts(derived)
    node = run.nodes[0]
    packages = [name.partition("+")[0] for name in node.software.packages if not name.startswith("zeropp")]
    facts = "".join(f"- {name}: {value}\n" for name, value in page.facts(derived))
    inputs = {pair for record in records for pair in record.inputs.items()}
    modules = [f"{name} (SHA-256 {sha[:12]})" for name, sha in sorted(inputs) if name != "corpus"]
    facts += f"- needed, but not in this archive: the suite's own {listed(modules)}\n" if modules else ""
    python = ".".join(str(node.machine.get("python")).split(".")[:2])
    texts = {
        "README.md": _README.format(
            suite=suite,
            suffix=archive.SUFFIX,
            question=" ".join(derived.frames.questions),
            headline="\n".join(head.lines),
            facts=facts,
        ),
        "VERDICTS.md": f"# Verdicts of {suite}\n\n`zeropp run {suite}.toml`, then `zeropp report {suite}`."
        f"\n\n{head.table.markdown() if len(head.table.data) else head.sentence}",
        f"{suite}.toml": run.suite.text,
        "packages.txt": "".join(f"{package}\n" for package in packages),
        "run.sh": _SCRIPT.format(
            suite=shlex.quote(suite),
            file=shlex.quote(f"{suite}.toml"),
            packed=shlex.quote(f"{suite}{archive.SUFFIX}"),
            commit=shlex.quote(str(node.code.get("commit") or "HEAD")),
            python=shlex.quote(f"python{python}"),
            changed="the first run's checkout had changes"
            if run.changes
            else "the first run was of this commit",
        ),
    }
    with tempfile.TemporaryDirectory() as made:
        packed = archive.pack(folder, Path(made), suite).read_bytes()
    files = {path: text.encode() for path, text in texts.items()} | {f"{suite}{archive.SUFFIX}": packed}
    for path, text in run.suite.configurations.items():
        if Path(path).is_absolute() or ".." in Path(path).parts or path.startswith("~"):
            raise RecordError(
                f"{path}: this file, which the suite names, lies outside of the suite's folder, so it cannot be "
                "packed; move it into that folder, change its path in the suite, and run the suite again"
            )
        if (plain := Path(path).as_posix()) in files:
            raise RecordError(
                f"{path}: this file, which the suite names, has the name of another file in the bundle; rename it, "
                "change its path in the suite, and run the suite again"
            )
        files[plain] = text.encode()
    buffer = io.BytesIO()
    # USTAR, the format of archives of records, has too little room for long names.
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=9, format=tarfile.PAX_FORMAT) as whole:
        for path, content in sorted(files.items()):
            entry = tarfile.TarInfo(f"{suite}-artifact/{path}")
            entry.size = len(content)
            whole.addfile(entry, io.BytesIO(content))
    target = into / f"{suite}-artifact{archive.SUFFIX}"
    write_whole(target, buffer.getvalue())
    return target
