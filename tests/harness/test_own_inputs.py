"""Suites with a user's own codecs, data, tokenizer, optimizer and schedule run from any working folder."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import cli
from harness.measure import machine
from harness.records.trial_record import Record, read_all
from tests.conftest import forget_suite
from tests.harness.test_cli import MAIN, by_python
from tests.report.conftest import undrawn

__all__ = ["undrawn"]  # a fixture

MINE = """
import numpy as np, torch

class Eighths:
    laws = ["zero", "sign"]
    block = 1
    def frame_bytes(self, numel): return numel
    def encode(self, x, frame): frame.view(torch.int8).copy_((x * 512).round().clamp(-127, 127))
    def decode(self, frame, out): out.copy_(frame.view(torch.int8) / 512)

class OnGpu(Eighths):
    device = "cuda"

class Broken(Eighths):
    def encode(self, x, frame): super().encode(x + 1, frame)

def tokens():
    draw = np.random.default_rng(0)
    return draw.integers(0, 300, 20000).astype(np.uint16), draw.integers(0, 300, 3000)

def signed(): return np.arange(-5, 900), np.arange(900)
def one(): return np.arange(900)
def raising(): raise RuntimeError("no data today")
def leaving(): raise SystemExit(0)
def pairs(): return (np.zeros((9, 2)), np.zeros(9, int)), (np.zeros((3, 2)), np.zeros(3, int))
def uneven(): return (np.zeros((9, 2)), np.zeros(8, int)), (np.zeros((3, 2)), np.zeros(3, int))
def reshaped(): return (np.zeros((9, 2)), np.zeros(9, int)), (np.zeros((3, 3)), np.zeros(3, int))
def retyped(): return (np.zeros((9, 2)), np.zeros(9, int)), (np.zeros((3, 2)), np.zeros(3))
def named(): return (np.zeros((9, 2)), np.array(["a"] * 9)), (np.zeros((3, 2)), np.array(["a"] * 3))
def pickled(): return (np.array([{}, {}]), np.zeros(2)), (np.array([{}]), np.zeros(1))
def endless(): return (np.full((9, 2), np.inf), np.zeros(9)), (np.zeros((3, 2)), np.zeros(3))
def empty(): return (np.zeros((9, 2)), np.zeros(9)), (np.zeros((0, 2)), np.zeros(0))
def three(): return (np.zeros(9),) * 3, (np.zeros(3),) * 3
def lengths(text): return [len(word) for word in text.split()]

def other(): return np.random.default_rng().integers(0, 300, 20000), np.arange(300)

class Plain(torch.optim.SGD):
    pass

class Normed(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()
        return super().step(closure)

class Sparse(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["s"] = torch.eye(4).to_sparse()

class Uncounted(Eighths):
    def frame_bytes(self, numel): return {}[numel]

class Halves(Eighths):
    kinds = ["bf16"]

class Shrinking(Eighths):
    def decode(self, frame, out): out.resize_(out.numel() // 2)

class Elsewhere(Eighths):
    device = "cuda:banana"

class Apart(Eighths):
    def decode(self, frame, out):
        super().decode(frame, out)
        out += frame.any() * (torch.distributed.is_initialized() and torch.distributed.get_rank()) / 4096

def flat(sequence, vocab):
    class Flat(torch.nn.Embedding):
        def forward(self, tokens, targets):
            return super().forward(tokens).square().mean()
    return Flat(vocab, 4)

def one_input(sequence, vocab): return torch.nn.Embedding(vocab, 4)
"""
HEAD = 'name = "q"\nquestion = "Does one\'s own run?"\n'
BODY = """
[defaults]
model.name = "gpt-tiny"
model.arguments.vocab = 512
corpus = "mine:tokens"
sequence = 16
tokens_per_rank = 32
steps = 3
warmup = 1
validate_every = 0
optimizer.name = "mine:Plain"
optimizer.arguments.lr = 0.5
cluster.link = "none"
cluster.ranks_per_node = 1
policy.max_padding = 0.9
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module and the suite in it; the working folder is another."""
    suites, work = tmp_path / "suites", tmp_path / "work"
    suites.mkdir()
    work.mkdir()
    (suites / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(work)
    return suites


def write(folder: Path, body: str) -> str:
    """Write the suite, and return its path."""
    (folder / "q.toml").write_text(HEAD + body, encoding="utf-8")
    return str(folder / "q.toml")


Process = subprocess.CompletedProcess[str]


@pytest.fixture
def zeropp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Process]:
    """A command line in this process without a module of the user's; ranks are processes that import it."""
    monkeypatch.setitem(sys.modules, "mine", sys)  # any module: it is removed when the test ends

    def zeropp(*arguments: str) -> Process:
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        forget_suite()
        capsys.readouterr()
        return Process(arguments, cli.main(arguments), stderr=capsys.readouterr().err)

    return zeropp


def losses(record: Record) -> list[float]:
    """Return the losses of the first rank."""
    return [step.loss for step in record.ranks[0].steps]


def single(records: list[Record], strategy: str, **fields: Any) -> Record:
    """Return the only record of a strategy whose trial has these fields."""
    (record,) = (
        record
        for record in records
        if record.trial["strategy"] == strategy
        and all(record.trial.get(name, False) == value for name, value in fields.items())
    )
    return record


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_all_that_is_ones_own_runs_together(folder: Path, zeropp: Callable[..., Process]) -> None:
    """A suite with the user's own codec, data and optimizer runs; checkpointing changes no loss, and reports need
    none of these modules.
    """
    body = BODY + (
        'optimizer.schedule = { warmup = 2, decay = "cosine", floor = 0.1 }\n'
        '[matrix]\nstrategy = ["single", "ddp", "qwz", "zeropp"]\npolicy.weights = ["mine:Eighths"]\n'
        "activation_checkpointing = [false, true]\n"
    )
    process = zeropp("run", "--no-report", write(folder, body))
    assert process.returncode == cli.OK, process.stderr
    assert "The declared laws of mine:Eighths hold." in process.stderr
    records = read_all(Path("results/q"))
    assert len(records) == 8
    for strategy in ("single", "ddp", "qwz", "zeropp"):
        plain, again = (single(records, strategy, activation_checkpointing=on) for on in (False, True))
        assert losses(plain) == losses(again)
    assert single(records, "qwz", activation_checkpointing=True).inputs.keys() == {
        "corpus", "optimizer", "codec mine:Eighths",
    }  # fmt: skip
    (folder / "mine.py").write_text("raise SystemExit(0)", encoding="utf-8")
    process = zeropp("report", str(folder / "q.toml"))
    assert process.returncode == cli.OK, process.stderr
    shutil.rmtree(folder)
    for command in (["report", "q"], ["show", "q"], ["show", records[0].id]):
        process = zeropp(*command)
        assert process.returncode == cli.OK, process.stderr


def test_rates_follow_the_schedule(folder: Path, zeropp: Callable[..., Process]) -> None:
    """A single step at the end of a decay has a learning rate of 0, so weights do not change, in peers neither."""
    body = BODY.replace("lr = 0.5", "lr = 50.0") + (
        "[matrix]\nstrategy = ['single', 'ddp', 'exact']\n"
        "[[zip]]\noptimizer.schedule.decay = ['none', 'linear']\n"
        "optimizer.schedule.warmup = [0, 0]\n"
    )
    body = body.replace("steps = 3\nwarmup = 1", "steps = 1\nwarmup = 0")
    process = zeropp("run", "--no-report", write(folder, body))
    assert process.returncode == cli.OK, process.stderr
    records = read_all(Path("results/q"))
    for strategy in ("single", "ddp", "exact"):
        pair = [record for record in records if record.trial["strategy"] == strategy]
        (still,) = (record for record in pair if "schedule" in record.trial["optimizer"])
        (moved,) = (record for record in pair if "schedule" not in record.trial["optimizer"])
        assert still.validations[-1].loss == pytest.approx(6.24, abs=0.1)  # log(512), untrained
        assert moved.validations[-1].loss > still.validations[-1].loss + 1


@pytest.mark.nightly
def test_a_tokenizer_makes_the_tokens(folder: Path, zeropp: Callable[..., Process]) -> None:
    """Of a text beside the suite, and token files are as good; what changed is found by its digest."""
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(
        " ".join("x" * (i * i % 37 + 1) for i in range(9000)), encoding="utf-8"
    )
    (folder / "ids").mkdir()
    for name in ("train", "validation"):
        np.save(folder / "ids" / f"{name}.npy", np.arange(4000, dtype=np.uint16) % 91)
    body = BODY.replace('corpus = "mine:tokens"\n', "") + (
        "[[zip]]\ncorpus = ['text', 'ids']\ntokenizer = ['mine:lengths', 'none']\n"
    )
    process = zeropp("run", "--no-report", write(folder, body + "[matrix]\nstrategy = ['zero3']\n"))
    assert process.returncode == cli.OK, process.stderr
    records = read_all(Path("results/q"))
    assert {"tokenizer" in record.inputs for record in records} == {True, False}
    (folder / "mine.py").write_text(MINE.replace("len(word)", "1 + len(word)"), encoding="utf-8")
    process = by_python(MAIN, "run", "--no-report", write(folder, body + "[matrix]\nstrategy = ['zero3']\n"))
    assert process.returncode == cli.REFUSED, process.stderr
    assert "was measured with another version of" in process.stderr


@pytest.mark.long
def test_an_image_classifier_of_ones_own_learns(folder: Path, zeropp: Callable[..., Process]) -> None:
    """That of the guide, with its images: arrays of one's own reach a model of one's own, and it learns ten
    classes; the images' digest is on the record, and other images are another corpus.
    """
    guide = (machine.ROOT / "docs" / "guide" / "suites.md").read_text(encoding="utf-8")
    section = guide.partition("### Inputs of any shape")[2].partition("### Batches")[0]
    module = section.partition("```python\n")[2].partition("```")[0]
    body = section.partition("```toml\n")[2].partition("```")[0]
    (folder / "mine.py").write_text(module, encoding="utf-8")
    (folder / "images.toml").write_text(body, encoding="utf-8")
    process = zeropp("run", "--no-report", str(folder / "images.toml"))
    assert process.returncode == cli.OK, process.stderr
    for record in read_all(Path("results/images")):
        assert losses(record)[0] > 1.0
        assert record.validations[-1].loss < 0.6
        assert record.inputs.keys() == {"corpus", "model"}
    (folder / "mine.py").write_text(module.replace("rng(0)", "rng(1)"), encoding="utf-8")
    process = by_python(MAIN, "run", "--no-report", str(folder / "images.toml"))
    assert "was measured with another version of corpus 'mine:images'" in process.stderr


DATA = {
    "mine:signed": "has a token -5; expected tokens of 0 and above",
    "mine:one": "returned a value of type ndarray; expected two values, for training and for validation",
    "mine:raising": "raised RuntimeError: no data today",
    "mine:leaving": "raised SystemExit: 0",
    "mine:pairs": "pairs of arrays, and the preset 'gpt-tiny' reads tokens or glyphs",
    "mine:uneven": "the numbers of inputs and targets for training are 9 and 8; expected equal numbers",
    "mine:reshaped": "inputs are (2,) of float64 for training and (3,) of float64 for validation",
    "mine:retyped": "targets are () of int64 for training and () of float64 for",
    "mine:named": "target for training: is an array of <U1; expected numbers",
    "mine:pickled": "input for training: is an array of object; expected numbers",
    "mine:endless": "input for training: contains NaN or infinity",
    "mine:empty": "input for validation: is an array of shape (0, 2); expected at least one example",
    "mine:three": "returned a tuple of length 3 for training; expected a pair of inputs and targets",
    "half": "has only train.npy; a corpus of tokens needs train.npy and validation.npy",
    "hollow": "train.npy: EOFError",
    "~nosuchuser/x": "'~nosuchuser/x': no such file or folder in",
}
OPTIMIZERS = {
    "mine:Eighths": "expected a class derived from torch.optim.Optimizer",
    "mine:Absent": "mine has no 'Absent'",
    "json:Plain": "the module of that name in ",
    "time:Plain": "import time finds a module without a file, which hides the module of that name in ",
    "mine:Normed": "optimizer.name = 'mine:Normed' is not elementwise: its steps on two pieces of a tensor",
    "mine:Sparse": "optimizer.arguments of mine:Sparse: ",
    "torch.optim:Muon": "the engine holds shards: set optimizer.name = 'Muon', which gathers each matrix on one rank",
}
CODECS = {
    "mine:Broken": "mine:Broken breaks the claim 'zero' (",
    "mine:No": "mine:No: mine has no 'No'",
    "mine:Uncounted": "KeyError: ",
    "mine:Halves": "add fp32, the type of master shards",
    "mine:Shrinking": "changed the shapes of its tensors",
    "mine:Elsewhere": "expected any, cpu, cuda",
    "mine:OnGpu": "mine:OnGpu supports only cuda, but the tensors are on cpu",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((("mine:tokens", data), message) for data, message in DATA.items()),
        *((("mine:Plain", optimizer), message) for optimizer, message in OPTIMIZERS.items()),
        *(
            (("", f"[matrix]\nstrategy = ['qwz']\npolicy.weights = ['{c}']\n"), message)
            for c, message in CODECS.items()
        ),
        (("vocab = 512", "vocab = 256"), "its largest token is 299, and the model's vocabulary has 256"),
        (('"gpt-tiny"', '"mine:flat"\nactivation_checkpointing = true'), "and the model has none"),
        (("lr = 0.5", "lr = 0.5\noptimizer.schedule.warmup = 5"), "the trial has 4 steps in all"),
        (
            ("lr = 0.5", "lr = 0.5\ntokenizer = 'mine:lengths'"),
            "consists of arrays, which need no tokenizer; remove tokenizer",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_trial(
    folder: Path, change: tuple[str, str], message: str, zeropp: Callable[..., Process]
) -> None:
    """Inputs that do not fit are refused in one line with status 2, before anything is written."""
    for hidden in ("json.py", "time.py"):  # the standard library's modules hide these files
        (folder / hidden).write_text(MINE, encoding="utf-8")
    for place, names in (("half", ["train.npy"]), ("hollow", ["train.npy", "validation.npy"])):
        (folder / place).mkdir()
        for name in names:
            (folder / place / name).touch()
    before, after = change
    body = BODY.replace(before, after) if before else BODY + after
    if "strategy" not in body:
        body += "[matrix]\nstrategy = ['zero3']\n"
    process = zeropp("run", write(folder, body))
    assert process.returncode == cli.REFUSED, process.stderr
    assert message in process.stderr
    assert process.stderr.count("\n") == 1
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("mine:tokens", "mine:other"), "than the process that started it ("),
        (("'zero3'", "'qwz'"), "codec mine:Apart decodes the same elements differently on rank 1"),
        (("gpt-tiny", "mine:one_input"), "model 'mine:one_input' raised TypeError: Embedding.forward()"),
    ],
)
def test_a_users_code_that_fails_on_a_rank_is_named(
    folder: Path, change: tuple[str, str], message: str, zeropp: Callable[..., Process]
) -> None:
    """The record names the user's code if data differ between draws, a codec decodes differently on a rank, or a
    model raises.
    """
    body = BODY + "[matrix]\nstrategy = ['zero3']\n"
    body = body.replace(*change) + ("policy.weights = ['mine:Apart']\n" if "qwz" in change[1] else "")
    process = zeropp("run", "--no-report", write(folder, body))
    assert process.returncode == cli.SOME_FAILED, process.stderr
    (record,) = read_all(Path("results/q"))
    assert message in record.failure.message
