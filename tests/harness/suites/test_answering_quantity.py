"""The quantity that answers a suite's question is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from harness.suites.answering_quantity import ChosenQuantity, Quantity, quantity
from harness.suites.suite import SuiteError
from harness.suites.suite_file import load

SUITES = Path(__file__).resolve().parents[3] / "suites"


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ("quickstart", "step"), ("ablation", "step"), ("bandwidth", "rate"), ("bits", "loss"),
        ("convergence", "loss"), ("generation", "tokens"), ("block_size", "error"), ("algorithms", "step"),
        ("nodes", "nodes"), ("offload", "memory"), ("stages", "size"), ("smoke", "trials"),
    ],
)  # fmt: skip
def test_shipped_suites_ask_for_what_their_questions_say(suite: str, expected: str) -> None:
    """For the shipped suites the choice fits the question: losses for training, errors for block sizes, and so on."""
    shipped = load(SUITES / f"{suite}.toml")
    assert quantity(shipped.combinations, shipped.answer) == expected


def test_a_suite_names_one_of_the_quantities(tmp_path: Path) -> None:
    """A suite's own choice decides; an unknown word is refused with the known ones."""
    path = tmp_path / "q.toml"
    text = (
        'name = "q"\nquestion = "Less?"\nanswer = "{}"\n[defaults]\nvalidate_every = 5\n'
        'measure_quantisation = true\n[matrix]\nstrategy = ["zero3", "zeropp"]\n'
    )
    names = set(get_args(ChosenQuantity)) - {""}
    assert names <= set(get_args(Quantity))
    for name in names:
        path.write_text(text.format(name))
        suite = load(path)
        assert quantity(suite.combinations, suite.answer) == suite.answer == name
    path.write_text(text.format("speed"))
    with pytest.raises(SuiteError, match=r"answer = \"speed\": .*'loss', 'step', 'bytes'"):
        load(path)
