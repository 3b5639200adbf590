"""Commands that only read suites and records never import what a suite names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.records import run_record
from harness.records.run_record import Node, Run, Software, SuiteText
from harness.records.trial_record import Record, read_all, write
from harness.suites.suite_file import load
from harness.suites.trial import Trial
from impl import named_object
from impl.named_object import NamedObjectError, import_object
from tests.harness.conftest import Zeropp
from tests.report.conftest import undrawn
from tests.report.records import record_of

__all__ = ["undrawn"]  # a fixture

# Every import of the module leaves a file beside it.
MODULE = """
import pathlib
import torch

(pathlib.Path(__file__).parent / "imported").touch()

class Bytes:
    laws = ["zero"]
    block = 96
    def frame_bytes(self, numel): return numel
    def encode(self, x, frame): frame.view(torch.int8).copy_((x * 512).round().clamp(-127, 127))
    def decode(self, frame, out): out.copy_(frame.view(torch.int8) / 512)

class Plain(torch.optim.SGD):
    pass

def build(sequence):
    class Flat(torch.nn.Embedding):
        def forward(self, tokens, targets):
            return super().forward(tokens).square().mean()
    return Flat(512, 4)

def words(text): return [len(word) for word in text.split()]
def tokens(): return list(range(200)) * 9, list(range(100))
"""
HEAD = """name = "q"
question = "Is it imported?"
[defaults]
sequence = 16
tokens_per_rank = 32
steps = 3
warmup = 1
cluster.link = "none"
cluster.nodes = 2
cluster.ranks_per_node = 1
policy.max_padding = 99.0
"""
EVERY_KIND = """
tokenizer = "marked:words"
optimizer.name = "marked:Plain"
optimizer.arguments.lr = 0.1
policy.weights = "marked:Bytes"
[matrix]
strategy = ["zero3", "qwz", "ddp"]
model.name = ["gpt-tiny", "marked:build"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the module."""
    (tmp_path / "marked.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "marked", raising=False)
    return tmp_path


def suite(folder: Path, body: str = EVERY_KIND) -> Path:
    """Write the suite, and return its path."""
    path = folder / "q.toml"
    path.write_text(HEAD + body, encoding="utf-8")
    return path


def recorded(trial: Trial) -> Record:
    """Write a record of a trial into the suite's results folder."""
    plain = record_of(Trial(strategy=trial.strategy), suite="q", code={}, units=[])
    software = Software(packages=["torch==2"], libraries={})
    node = Node(machine={}, code={"version": "1"}, software=software, environment={})
    run = Run(suite=SuiteText(name="q.toml", text=HEAD + EVERY_KIND), changes=None, nodes=[node])
    name = run_record.write(Path("results/q"), run)
    record = plain.model_copy(update={"id": trial.id, "trial": trial.canonical(), "run": name})
    write(Path("results/q"), record)
    return record


def imported(folder: Path) -> bool:
    """Return whether the module has been imported."""
    return (folder / "imported").exists()


@pytest.mark.usefixtures("undrawn")
def test_no_reading_command_imports_the_suites_modules(folder: Path, zeropp: Zeropp) -> None:
    """Plan, new, show, report, archive, bundle and compare leave the module alone; plan --import imports it."""
    path = suite(folder)
    for strategy, changes in (("zero3", {}), ("qwz", {"weights": "marked:Bytes"})):
        fields = {"tokenizer": "marked:words", "optimizer": {"name": "marked:Plain"}, "policy": changes}
        written = recorded(Trial.model_validate({"strategy": strategy} | fields))
    for options in ([], ["--json"], ["--csv"]):
        zeropp("plan", path, *options)
    zeropp("new", "first")
    for command in (
        ("show", "q"), ("show", path), ("show", written.id), ("report", "q"), ("archive", "q", "packed"),
        ("report", "packed"), ("bundle", "q", "bundles"), ("compare", "results/q", "results/q"),
    ):  # fmt: skip
        assert cli.main([*map(str, command)]) in (cli.OK, cli.SOME_FAILED), command
        assert not imported(folder), command
    zeropp("plan", path, "--import")
    assert imported(folder)


@pytest.mark.parametrize(
    ("body", "missing", "known"),
    [
        ('tokenizer = "marked:words"\n', "whether the data fit (tokenizer marked:words)", {"memory_bytes"}),
        ('corpus = "marked:tokens"\n', "whether the data fit (corpus marked:tokens)", {"memory_bytes"}),
        ('optimizer.name = "marked:Plain"\n', "memory (optimizer marked:Plain)", {"egress_bytes"}),
        ('policy.weights = "marked:Bytes"\nstrategy = "qwz"\n', "and trial ids (codec marked:Bytes)", set()),
        ('model.name = "marked:build"\n', "parameters, bytes, memory and time (model marked:build)", None),
    ],
)
def test_plan_says_which_numbers_are_missing(
    folder: Path, body: str, missing: str, known: set[str] | None, zeropp: Zeropp
) -> None:
    """Without --import plan names the numbers and the object that they need; all others are as with --import."""
    path = suite(folder, body)
    assert missing in " ".join(zeropp("plan", path).stdout.split())
    plan = json.loads(zeropp("plan", path, "--json").stdout)
    assert missing in plan["not_imported"]
    assert not imported(folder)
    complete = json.loads(zeropp("plan", path, "--import", "--json").stdout)
    assert complete["not_imported"] == ""
    for row, whole in zip(plan["trials"], complete["trials"], strict=True):
        assert all(row[name] in (None, whole[name]) for name in row.keys() - {"trial"})
        assert (row["id"] is None) == ("codec" in missing)
        assert (row["parameters"] is None) == (known is None)
        assert all(row[name] == whole[name] is not None for name in known or ())


def test_plan_is_whole_without_own_modules(folder: Path, zeropp: Zeropp) -> None:
    """A suite with presets and a published format has the same plan with --import and without."""
    path = suite(folder, 'policy.weights = "nf4"\n[matrix]\nstrategy = ["zero3", "qwz"]\n')
    plain = zeropp("plan", path, "--json").stdout
    assert zeropp("plan", path, "--json", "--import").stdout == plain
    assert json.loads(plain)["not_imported"] == ""


def test_follow_takes_the_alignment_from_a_record(folder: Path, zeropp: Zeropp) -> None:
    """Show --follow finds the trials of a suite with a codec of its own without importing the codec."""
    path = suite(folder, 'policy.weights = "marked:Bytes"\n[matrix]\nstrategy = ["zero3", "qwz"]\n')
    for trial in load(path).trials:
        recorded(trial)
    (folder / "imported").unlink()
    (folder / "marked.py").write_text("raise SystemExit(3)", encoding="utf-8")
    shown = zeropp("show", path, "--follow").stdout
    assert all(record.id in shown for record in read_all(Path("results/q")))
    assert len(shown.splitlines()) == 2


def test_a_module_does_not_pass_for_a_library(folder: Path) -> None:
    """While imports are forbidden, the suite's folder is not on sys.path, and objects are refused by name."""
    before = [*sys.path]
    with named_object.forbidden():
        load(suite(folder))
        with pytest.raises(NamedObjectError, match="marked:build: this command imports no module"):
            import_object("marked:build")
    assert sys.path == before
    assert named_object.allowed()
