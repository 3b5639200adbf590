"""The examples of docs/reference/wire_format.md equal the reference."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch

from impl.codecs import reference
from impl.codecs.codec import parse
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Key
from tests.support.philox import bits_of, philox

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "wire_format.md").read_text(encoding="utf-8")
KEY = Key(7, 3, 0, "blocks.0", "weights")


def blocks(language: str) -> list[list[tuple[str, str]]]:
    """Returns the fenced blocks of a language, as pairs of a line's first word and the rest of it."""
    examples = []
    for block in re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL):
        joined = re.sub(r"\n {11}", " ", block)
        examples.append([(line[:11].strip(), line[11:]) for line in joined.splitlines()])
    return examples


def numbers(text: str) -> torch.Tensor:
    return torch.tensor([float(word) for word in text.split()])


@pytest.mark.parametrize("lines", blocks("frame"), ids=lambda lines: dict(lines)["codec"])
def test_frames_are_what_the_reference_writes(lines: list[tuple[str, str]]) -> None:
    """An example's elements are encoded to its frame, byte by byte, which decodes to its numbers."""
    fields = dict(lines)
    codec, x = parse(fields["codec"]), numbers(fields["elements"])
    frame, decoded = torch.empty(codec.frame_bytes(len(x)), dtype=torch.uint8), torch.empty(len(x))
    reference.encode(codec, x, frame, noise=KEY.noise())
    reference.decode(codec, frame, decoded)
    assert bytes(frame.tolist()).hex(" ", -4) == fields["frame"]
    wanted = numbers(fields["decoded"])
    assert torch.allclose(decoded, wanted, rtol=1e-7, atol=0)
    assert torch.equal(decoded.signbit() & (decoded == 0), wanted.signbit() & (wanted == 0))


def test_the_first_frame_is_what_the_reference_writes() -> None:
    """The frame that the page draws, of eight elements in int4:4, is right byte by byte."""
    (block,) = re.findall(r"^```text\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    stated = [byte for line in block.splitlines() for byte in line.split("   ")[0].split()]
    codec = parse("int4:4")
    frame = torch.empty(codec.frame_bytes(8), dtype=torch.uint8)
    reference.encode(codec, torch.tensor([7, -7, 3.4, 0.5, 1.5, -0.5, 0, 2]), frame)
    assert " ".join(stated) == bytes(frame.tolist()).hex(" ")


def test_every_kind_has_an_example() -> None:
    """Integers, clipped integers, floats, MX, stochastic rounding and rotation each have an example."""
    shown = [dict(lines)["codec"] for lines in blocks("frame")]
    assert {re.sub(r"\d+", "", text) for text in shown} == {
        "fpem:", "mxfp", "int::clip", "int::stochastic", "int::hadamard",
    }  # fmt: skip
    assert len(shown) == 7


def test_random_bits_are_those_of_the_page() -> None:
    """The page's key text, its digest, Philox's words and the elements' halves follow from one another."""
    (lines,) = blocks("noise")
    fields = dict(lines)
    digest = hashlib.blake2b(fields["text"].encode(), digest_size=16).digest()
    inputs = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
    assert tuple(inputs) == KEY.noise().philox
    assert " ".join(f"{word:08x}" for word in inputs) == fields["words"]
    output = philox((0, 0, inputs[0], inputs[1]), (inputs[2], inputs[3]))
    assert " ".join(f"{word:08x}" for word in output) == fields["octet 0"]
    assert " ".join(f"{bits_of(KEY.noise(), i):04x}" for i in range(8)) == fields["bits"]


def test_carried_errors_are_those_of_the_page() -> None:
    """The same gradient, encoded three times with its carried error, decodes to the page's numbers."""
    (lines,) = blocks("carried")
    codec, error = parse("int4:4"), torch.zeros(4)
    frame, decoded = torch.empty(codec.frame_bytes(4), dtype=torch.uint8), torch.empty(4)
    for index, (word, text) in enumerate(lines):
        assert word == ("decoded", "error")[index % 2]
        if word == "decoded":
            reference.encode(codec, torch.tensor([7, 0.4, -0.4, 3]), frame, carried=Carried(error))
            reference.decode(codec, frame, decoded)
        assert torch.allclose(decoded if word == "decoded" else error, numbers(text), atol=1e-6)
    assert len(lines) == 6
