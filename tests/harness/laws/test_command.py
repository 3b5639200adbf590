"""``zeropp check codecs`` prints what holds, what does not and what cannot be tried; its page is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tables import DOCS
from docs.tables.codecs import SHOWN, formula
from harness import cli
from harness.laws import command
from harness.laws.subject import REPRESENTATIVE, why_missing
from impl.codecs.codec import FORMATS, Codec, parse

BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)
OWN = (DOCS / "guide" / "own_kernel.md").read_text(encoding="utf-8")


def plain(text: str) -> str:
    """Printed lines without the blanks at their ends, and without empty ones."""
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the guide's codec, as ``mine`` and, mended, as ``mended``, and its ``kernel``."""
    code, kernel = (text for language, text in BLOCK.findall(OWN) if language == "python")
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    (tmp_path / "mended.py").write_text(code.replace("block.max()", "block.abs().max()"), encoding="utf-8")
    (tmp_path / "kernel.py").write_text(kernel, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.long
@pytest.mark.usefixtures("folder")
def test_the_pages_example_is_real(capsys: pytest.CaptureFixture[str]) -> None:
    """The guide's codec breaks the laws that the guide prints; mended it holds, and so does its kernel."""
    (wanted,) = (text for language, text in BLOCK.findall(OWN) if language == "text")
    assert cli.main(["check", "codecs", "--codec", "mine:Int8"]) == command.VIOLATED
    assert plain(capsys.readouterr().out) == plain(wanted)
    assert cli.main(["check", "codecs", "--codec", "mended:Int8"]) == cli.OK
    out = capsys.readouterr().out
    assert out.count("holds") == 6
    assert "FAILS" not in out
    assert cli.main(["check", "codecs", "--codec", "kernel:Kernel"]) == cli.OK
    assert "FAILS" not in capsys.readouterr().out


@pytest.mark.parametrize("texts", [SHOWN, REPRESENTATIVE])
def test_codecs_of_every_kind_are_shown_and_tried(texts: tuple[str, ...]) -> None:
    """Page and command name every element type, width and option; the command tries all formats too."""
    wanted = {"shard", "asym", "clip", "hadamard", "stochastic", "fp8e4m3", "fp8e5m2", "mxfp8", "mxfp8e5m2"}
    wanted |= {"mxfp4", "fp32", "bf16", "fp16"} | {f"int{bits}" for bits in range(2, 9)}
    parts = {part for text in texts for part in re.sub(r"hadamard\d+", "hadamard", text).split(":")}
    assert parts >= (wanted if texts is SHOWN else wanted | {*FORMATS})
    assert [str(parse(text)) for text in texts] == [*texts]


@pytest.mark.parametrize("text", SHOWN)
def test_formulas_are_those_of_the_code(text: str) -> None:
    """The page's largest errors are the declared bounds of a block in [-1, 1]."""
    codec: Codec = parse(text)
    value = formula(codec).replace("max", "1").replace("range", "2")
    factors, _, divisor = value.partition(" / ")
    product = 1.0
    for factor in factors.split(" * "):
        product *= float(factor)
    shown = product / float(divisor or 1)
    assert shown == pytest.approx(codec.error_bound(-1.0, 1.0), rel=1e-3, abs=2e-7)


@pytest.mark.parametrize("text", ["mxfp8", "mxfp8e5m2", "mxfp4"])
def test_the_formula_of_shared_scales_is_their_worst(text: str) -> None:
    """Where the bound depends on where the largest element lies in its binade, the page gives the most."""
    codec = parse(text)
    most = max(codec.error_bound(0.0, 1 + i / 64) / (1 + i / 64) for i in range(64))
    assert most == pytest.approx(1 / float(formula(codec).partition(" / ")[2]), rel=1e-3)


def test_the_default_is_every_representative_on_every_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without options the representative codecs, here three, hold on all backends that are found."""
    few = ("bf16", "int4:32:asym", "mxfp4:stochastic")
    monkeypatch.setattr("harness.laws.subject.REPRESENTATIVE", few)
    assert cli.main(["check", "codecs", "--examples", "2", "--elements", "100"]) == cli.OK
    out = capsys.readouterr().out
    for text in few:
        assert f"  {text} on reference " in out
    assert out.count(" on reference ") == len(few)
    assert (" on cpu " in out) == (why_missing("cpu") is None)


def test_one_codec_on_one_backend(capsys: pytest.CaptureFixture[str]) -> None:
    """Options choose; laws that a codec does not declare are dashes."""
    arguments = ["--backend", "reference", "--codec", "int4:8:asym", "--examples", "5", "--seed", "3"]
    assert cli.main(["check", "codecs", *arguments]) == cli.OK
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "int4:8:asym" in line]
    # frame, local, sum, fused, bound, zero, power_of_two, nonfinite, each with its number of rows
    assert row[3::2] == ["holds"] * 8
    assert all(int(count.strip("()")) > 5 for count in row[4::2])


KERNEL = """
import torch
from impl.codecs import reference
from impl.codecs.codec import parse

class Kernel:
    codec = "int4:8:stochastic"
    kinds = ["fp32", "bf16"]

    def encode(self, x, frame, noise):
        reference.encode(parse(self.codec), x, frame, noise=noise)

    def decode(self, frame, out):
        reference.decode(parse(self.codec), frame, out)

class Deaf(Kernel):
    def encode(self, x, frame, noise):
        super().encode(x, frame, type(noise)(noise.philox))

kernel = Kernel()

class Nothing: pass
class Lawless:
    def encode(self, x, frame): pass
    def decode(self, frame, out): pass
class Outlaw(Lawless): laws = ["bound", "speed"]
class Unblocked(Lawless):
    laws = ["zero"]
    def frame_bytes(self, numel): return numel
class Certain(Unblocked):
    laws, block = ["unbiased"], 4
    def error_bound(self, low, high, out): return 1.0
class Odd(Lawless): codec = "int9:4"
class Wide(Lawless): codec, kinds = "int8:4", ["fp64"]
class Elsewhere(Lawless): codec, device = "int8:4", "nonsense"
class Raising(Lawless):
    def __init__(self): raise RuntimeError("boom\\nand more")
class Leaving(Lawless):
    def __init__(self): raise SystemExit(0)
"""


@pytest.mark.long
def test_a_kernel_of_ones_own_is_compared_bit_for_bit(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that claims to be a codec holds if its bits do; one that ignores its position fails."""
    monkeypatch.setattr("harness.laws.laws.DRAWS", 64)
    (folder / "kernels_of_mine.py").write_text(KERNEL, encoding="utf-8")
    arguments = ["check", "codecs", "--examples", "10", "--elements", "300", "--codec"]
    assert cli.main([*arguments, "kernels_of_mine:kernel"]) == cli.OK
    capsys.readouterr()
    assert cli.main([*arguments, "kernels_of_mine:Deaf"]) == command.VIOLATED
    out = capsys.readouterr().out
    assert "kernels_of_mine:Deaf breaks bits: frames and decoded elements equal the reference's" in out
    assert re.search(r"byte \d+ of the frame is [0-9a-f]{2}, the reference's [0-9a-f]{2}\n", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--codec", "int9:64"), "codec 'int9:64': int9: integer codecs have 2 to 8 bits"),
        (("--codec", "nonsense"), "codec 'nonsense': expected fp32"),
        (("--codec", "mine:"), "a codec of your own is named as module:object"),
        (("--codec", "no_such_module:thing"), "cannot import 'no_such_module'"),
        (("--codec", "leaves:thing"), "cannot import 'leaves': SystemExit: 0"),
        (("--codec", "users:thing"), "users has no 'thing'"),
        (("--codec", "int4:" + "9" * 5000), ""),
        (("--codec", "users:Nothing"), "users:Nothing: has no method 'encode'"),
        (("--codec", "users:Lawless"), "has neither 'codec' nor a list 'laws' with some of bound, zero"),
        (("--codec", "users:Outlaw"), "unknown law 'speed': expected some of bound"),
        (
            ("--codec", "users:Unblocked"),
            "block None: expected a number of elements of 1 or more, or 'shard'",
        ),
        (("--codec", "users:Certain"), "promises the law 'unbiased', but is not stochastic"),
        (
            ("--codec", "users:Odd"),
            "users:Odd: its attribute 'codec' is wrong: codec 'int9:4': int9: integer",
        ),
        (("--codec", "users:Wide"), "kinds ['fp64']: expected a list with some of fp32, bf16, fp16"),
        (("--codec", "users:Elsewhere"), "users:Elsewhere: device 'nonsense': expected any, cpu, cuda"),
        (("--codec", "users:Raising"), "users:Raising: raised RuntimeError: boom"),
        (("--codec", "users:Leaving"), "users:Leaving: raised SystemExit: 0"),
        (("--codec", "users:kernel", "--backend", "cpu"), "users:kernel, which brings its own code"),
        (("--backend", "gpu"), "unknown backend 'gpu': expected one of reference, cpu, cuda"),
        (("--examples", "0"), "--examples"),
        (("--elements", "0"), "--elements"),
    ],
)
def test_what_cannot_be_tried_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """Unknown codecs, backends and objects, and objects that lack something, are refused with status 2."""
    (folder / "users.py").write_text(KERNEL, encoding="utf-8")
    (folder / "leaves.py").write_text("raise SystemExit(0)", encoding="utf-8")
    assert cli.main(["check", "codecs", *arguments]) == cli.REFUSED
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_backend_that_is_not_here_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a CUDA device the CUDA backend is refused, saying that."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["check", "codecs", "--backend", "cuda"]) == cli.REFUSED
    assert re.search("no CUDA device|CuPy is not installed", capsys.readouterr().err)


def test_backends_that_are_left_out_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all backends found are tried, a line for each of the others says why it is not."""
    reasons = {"cpu": "backend 'cpu': no C++ compiler", "cuda": "backend 'cuda': no device"}
    monkeypatch.setattr("harness.laws.subject.why_missing", reasons.get)
    arguments = ["check", "codecs", "--examples", "2", "--codec", "int8:4"]
    assert cli.main(arguments) == cli.OK
    out = capsys.readouterr().out
    for reason in reasons.values():
        assert out.count(f"not checked: {reason}\n") == 1
    assert cli.main([*arguments, "--backend", "reference"]) == cli.OK
    assert "not checked" not in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=pytest.mark.needs("c++"))])
def test_formats_and_the_largest_block_are_tried_on_every_backend(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A format's kernels hold, not its torch object alone; a block of 2^31 - 1 elements has shorter rows."""
    codecs = ("nvfp4", "spike2", "int8:2147483647")
    options = [option for text in codecs for option in ("--codec", text)]
    options += ["--backend", backend, "--examples", "5", "--elements", "3000"]
    assert cli.main(["check", "codecs", *options]) == cli.OK
    out = capsys.readouterr().out
    assert all(f"{text} on {backend}" in out for text in codecs)
    assert "FAILS" not in out


def test_an_argument_that_is_nested_too_deep_for_json_is_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A method that cannot be imported is refused in one line, whatever its arguments are."""
    assert cli.main(["check", "method", "absent:Method", "--argument", f"a={'[' * 100_000}"]) == cli.REFUSED
    err = capsys.readouterr().err
    assert "absent" in err
    assert err.count("\n") == 1
