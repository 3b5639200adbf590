"""Writes the shell script that runs one recorded trial again.

The script checks out the recorded commit, applies the recorded changes, installs the recorded packages, writes the
suite file and runs the trial.  The script writes files from quoted here-documents, whose text a shell copies without
expanding it.
"""

from __future__ import annotations

import json
import shlex
from pathlib import PurePosixPath
from typing import Final

from harness.errors import one_line
from harness.records.run_record import Node, Run
from harness.records.trial_record import Record

_PACKAGE: Final = "zeropp-bench"
_EVERYWHERE: Final = ("stdlib", "glyphs")  # corpora that need no file


def script(record: Record, run: Run) -> str:
    """Return the shell script that runs a recorded trial again; it is to be started in a clone of the repository.

    Where the record lacks something, such as the commit or a data file, a comment in the script says so.

    Args:
        record: The record of the trial.
        run: Facts about the run to which the trial belongs, such as its suite file and the nodes' software.
    """
    node, folder, changes = run.nodes[0], f"zeropp-{record.id}", run.changes
    lines = ["set -e", *_comments(record, run), ""]
    commit = node.code.get("commit")
    if commit is None:
        version, source = one_line(str(node.code.get("version"))), node.code.get("source")
        lines.append(
            f"# The commit is not known; the version was {version}, the hash of the sources {source}."
        )
    at = "" if commit is None else f" {shlex.quote(str(commit))}"
    lines += [f"git worktree add --detach ../{folder}{at}", f"cd ../{folder}"]
    if changes is not None and changes.whole:
        lines += [*_file("changes.patch", changes.text), "git apply changes.patch"]
    elif changes is not None:
        size = f"{changes.size} bytes, SHA-256 {changes.sha256}"
        lines.append(
            f"# The checkout had changes that are not recorded in full ({size}): the code that ran was different."
        )
    lines += ["", *_installed(node), ""]
    if run.suite is None:
        lines.append(f"# The suite file is not known; the trial was {json.dumps(record.trial)}")
    else:
        for path, text in (*run.suite.configurations.items(), ("suite.toml", run.suite.text)):
            lines += _file(path, text)
        sweeps = ["--sweeps", str(record.sweep + 1)] if record.sweep else []
        command = ["run", "suite.toml", "--only", record.id, "--results", "again", *sweeps]
        lines.append(f".venv/bin/zeropp {shlex.join(command)}")
        lines.append(f".venv/bin/zeropp show {record.id} --results again")
    return "\n".join(lines) + "\n"


def _comments(record: Record, run: Run) -> list[str]:
    """Return comments that say when and where the trial ran, and in which environment."""
    lines = [f"Trial {record.id} of suite {record.suite}, {record.started}."]
    for number, node in enumerate(run.nodes):
        facts = {name: fact for name, fact in node.machine.items() if fact and name != "packages"}
        facts |= node.software.libraries | node.environment
        lines.append(f"Node {number}: {', '.join(f'{name} {fact}' for name, fact in facts.items())}")
    for name, digest in record.inputs.items():
        if name != "corpus" or record.trial.get("corpus") not in _EVERYWHERE:
            lines.append(
                f"Its {name} is not recorded: put the file with SHA-256 {digest} next to suite.toml."
            )
    return ["# " + one_line(line) for line in lines]


def _installed(node: Node) -> list[str]:
    """Return shell commands that make a virtual environment with the Python version and the packages of ``node``.

    Local build tags (``+cpu``) are dropped from the versions, since package indexes do not have such builds.
    """
    python = ".".join(str(node.machine.get("python")).split(".")[:2])
    packages = [name for name in node.software.packages if name.partition("==")[0].lower() != _PACKAGE]
    return [
        f"{shlex.quote(f'python{python}')} -m venv .venv",
        *_file("packages.txt", "".join(f"{name.partition('+')[0]}\n" for name in packages)),
        ".venv/bin/pip install --no-deps -r packages.txt",
        ".venv/bin/pip install --no-deps -e .",
    ]


def _file(name: str, text: str) -> list[str]:
    """Return the lines of a shell script that write ``text`` to the file ``name`` in the current folder.

    If ``name`` leads out of the current folder, returns a comment that says so instead.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name + text:
        return [f"# Not written, since the path leads out of this folder: {one_line(name)}"]
    end = "END"
    while end in text.split("\n"):
        end += "_"
    mkdir = [f"mkdir -p {shlex.quote(str(path.parent))}"] if len(path.parts) > 1 else []
    newline = "" if text.endswith("\n") or not text else "\n"
    return [*mkdir, f"cat > {shlex.quote(name)} <<'{end}'", f"{text}{newline}{end}"]
