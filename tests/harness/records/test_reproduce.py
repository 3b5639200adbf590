"""A recorded trial is run again from its record and the run record alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness import cli
from harness.measure import machine, run_environment
from harness.records import reproduce, run_record, trial_record
from harness.records.run_record import Changes, SuiteText
from harness.records.trial_record import RecordError
from harness.suites.trial import Trial
from tests.harness.conftest import Zeropp
from tests.report.records import record_of

SUITE = """\
name = "again"
question = "Does it come out as it was?"
[defaults]
model.name = "gpt-tiny"
sequence = 32
tokens_per_rank = 64
steps = 2
warmup = 0
cluster = { nodes = 2, ranks_per_node = 1, link = "paced", rate = "100 Mbit/s" }
policy = { weights = "int8:64", gradients = "int4:64" }
"""


def shell(script: str, folder: Path) -> str:
    """Return what a shell prints that runs a script in a folder; it has our Python and no other Python path."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash"], input=script, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copied(to: Path) -> None:
    """Return a repository whose one commit has the sources of this one."""
    listed = shell(
        "git ls-files -co --exclude-standard harness impl report tests/__init__.py pyproject.toml",
        machine.ROOT,
    )
    for name in listed.split():
        if (machine.ROOT / name).is_file():  # not one that is deleted
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(machine.ROOT / name, to / name)
    shell("git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm all", to)


def ran(folder: Path) -> dict[str, Any]:
    """Return, by trial id, the parts of a sweep's records that must be equal when a trial runs again."""
    return {
        made.id: (
            made.code["source"],
            [rank.ledger for rank in made.ranks],
            [step.loss for rank in made.ranks for step in rank.steps],
        )
        for made in trial_record.read_all(folder)
    }


@pytest.mark.long
def test_a_trial_runs_again_from_its_record(tmp_path: Path) -> None:
    """In a checkout with changes, the script gives the same sources, id, bytes and losses."""
    clone = tmp_path / "clone"
    clone.mkdir()
    copied(clone)
    changed = clone / "harness" / "errors.py"
    changed.write_text(changed.read_text(encoding="utf-8") + "\n# An \u00dcberrest.\n", encoding="utf-8")
    (clone / "harness" / "new.py").write_text("NEW = 1\n", encoding="utf-8")
    (clone / "q.toml").write_text(SUITE, encoding="utf-8")
    zeropp = f"PYTHONPATH=. {sys.executable} -m harness.cli"
    shell(f"{zeropp} run q.toml --results r --no-report", clone)
    before = ran(clone / "r" / "again")
    wanted = min(before)
    script = shell(f"{zeropp} show {wanted} --results r --reproduce", clone)
    assert "git apply changes.patch" in script
    installing = re.search(r"(?ms)^\S+ -m venv.*?^\S+pip install --no-deps -e \.$", script)
    assert installing is not None
    assert f"\ntorch=={machine.facts()['packages']['torch'].partition('+')[0]}\n" in installing[0]
    shell(script.replace(installing[0], "").replace(".venv/bin/zeropp", zeropp), clone)
    after = ran(tmp_path / f"zeropp-{wanted}" / "again" / "again")
    assert after == {wanted: before[wanted]}


def run_with(**fields: Any) -> run_record.Run:
    """Return the run record of a run on this machine."""
    run = run_environment.run_of(None, [run_environment.identity()])
    return run.model_copy(update=fields)


@pytest.mark.long
@given(text=st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"])))
@example(text="END\nrm -rf $HOME\n$(touch here)\nEND_")
@example(text="'; touch here; '")
@example(text="")
def test_texts_reach_no_shell(text: str) -> None:
    """The text of a suite file is written unchanged, and the shell runs no part of it."""
    made = record_of(Trial(steps=2, warmup=0))
    script = reproduce.script(made, run_with(changes=None, suite=SuiteText(name="q.toml", text=text)))
    start = script.index("cat > suite.toml")
    end = script.index(".venv/bin/zeropp run")
    written = script[start:end]
    head, _, rest = written.partition("\n")
    word = re.fullmatch(r"cat > suite.toml <<'(END_*)'", head)
    assert word is not None
    lines = rest.split("\n")
    assert lines.index(word[1]) == len(lines) - 2  # nothing but the end of the text ends it
    assert "\n".join(lines[:-2]) in (text, text.removesuffix("\n"))


@pytest.mark.parametrize("path", ["../x.json", "/tmp/x.json", "a/../../x.json"])  # noqa: S108 - never written
def test_nothing_is_written_outside(path: str) -> None:
    """A configuration whose path leads out of the folder is named in a comment and not written."""
    text = SuiteText(name="q.toml", text="x", configurations={path: "{}"})
    script = reproduce.script(record_of(Trial(steps=2, warmup=0)), run_with(suite=text))
    assert f"# Not written, since the path leads out of this folder: {path}" in script
    assert f"> {path}" not in script


def test_what_is_not_known_is_said() -> None:
    """Changes that are not recorded in full, and an unknown commit, are comments; the rest of the script is there."""
    changes = Changes(size=10**6, sha256="0" * 64, text="diff")
    run = run_with(changes=changes)
    (node, *_) = run.nodes
    run = run.model_copy(update={"nodes": [node.model_copy(update={"code": node.code | {"commit": None}})]})
    script = reproduce.script(record_of(Trial(steps=2, warmup=0)), run)
    assert "not recorded in full (1000000 bytes" in script
    assert "git apply" not in script
    assert "The commit is not known" in script
    assert "The suite file is not known" in script


def test_an_edited_file_of_a_run_is_refused(tmp_path: Path) -> None:
    """A run record whose name is not the hash of its content is refused."""
    name = run_record.write(tmp_path, run_with())
    assert run_record.read(tmp_path, name).nodes
    path = run_record.path_of(tmp_path, name)
    path.write_text(path.read_text(encoding="utf-8").replace('"Linux"', '"Plan 9"'), encoding="utf-8")
    with pytest.raises(RecordError, match="edited or damaged"):
        run_record.read(tmp_path, name)


def test_secrets_are_not_kept() -> None:
    """Recorded environment variables have no value if their names mark them as secret."""
    kept = run_environment.variables(
        {"NCCL_DEBUG": "INFO", "TORCH_HUB_TOKEN": "s3cret", "PATH": "/bin", "OMP_NUM_THREADS": "2"}
    )
    assert kept == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "TORCH_HUB_TOKEN": run_environment.HIDDEN}


def test_a_record_without_the_file_of_a_run(tmp_path: Path, zeropp: Zeropp) -> None:
    """An older record without a run record is refused in one line."""
    made = record_of(Trial(steps=2, warmup=0))
    trial_record.write(tmp_path / "q", made)
    refused = zeropp("show", made.id, "--results", tmp_path, "--reproduce", status=cli.REFUSED)
    assert "--reproduce needs a record that names its run's file" in refused.stderr
