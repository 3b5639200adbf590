"""Which quantity answers a suite's question."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from harness.suites.question import LEAST_STEPS, SAID, Quantity, quantity
from harness.suites.suite_file import SuiteError, load
from harness.suites.trial import Cluster, PolicyChanges, Trial

SUITES = Path(__file__).resolve().parents[3] / "suites"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([{}, {"strategy": "zero3"}], "step"),
        ([{"validate_every": 20}], "loss"),
        ([{"validate_every": 0, "steps": LEAST_STEPS}], "loss"),
        ([{"validate_every": 0, "steps": 4}], "step"),
        ([{"workload": "generate"}], "tokens"),
        ([{"memory_limit": "64 MiB", "validate_every": 10}], "size"),
        ([{"measure_quantisation": True}], "error"),
        ([{"measure_quantisation": True}, {"measure_quantisation": True, "strategy": "zero3"}], "step"),
        ([{"cluster": Cluster(rate="50 Mbit/s")}, {"cluster": Cluster(rate="100 Mbit/s")}], "rate"),
        ([{"cluster": Cluster(nodes=2)}, {"cluster": Cluster(nodes=4)}], "nodes"),
        ([{"policy": PolicyChanges(offload_optimizer=0.5)}, {}], "memory"),
    ],
)
def test_axes_say_what_is_asked(fields: list[dict[str, Any]], expected: str) -> None:
    """The quantity that answers follows from the trials."""
    assert quantity([Trial(**one) for one in fields]) == expected


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ("quickstart", "step"), ("ablation", "step"), ("bandwidth", "rate"), ("bits", "loss"),
        ("convergence", "loss"), ("generation", "tokens"), ("block_size", "error"), ("algorithms", "error"),
        ("nodes", "nodes"), ("offload", "memory"), ("stages", "size"), ("smoke", "trials"),
    ],
)  # fmt: skip
def test_shipped_suites_ask_for_what_their_questions_say(suite: str, expected: str) -> None:
    """Losses where a question is of training, errors of blocks, a break-even of rates, and so on."""
    found = load(SUITES / f"{suite}.toml")
    assert quantity(found.cells, found.answer) == expected


def test_a_suite_names_one_of_the_quantities(tmp_path: Path) -> None:
    """What it names comes before the axes; any other word is refused with those that there are."""
    path = tmp_path / "q.toml"
    text = 'name = "q"\nquestion = "Less?"\nanswer = "{}"\n[defaults.cluster]\nnodes = 2\n'
    assert set(SAID) <= set(get_args(Quantity))
    for word in SAID:
        path.write_text(text.format(word))
        suite = load(path)
        assert quantity(suite.cells, suite.answer) == suite.answer == word
    path.write_text(text.format("speed"))
    with pytest.raises(SuiteError, match=r"answer = \"speed\": .*'loss', 'step', 'bytes'"):
        load(path)
