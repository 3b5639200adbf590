"""A policy's field is declared once, and suites, names, refusals and documents read the declaration."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from impl.codecs.codec import BF16, Raw, parse
from impl.policy.policy import SETTINGS, MemoryLimits, Offload, Policy, PolicyError
from impl.policy.presets import preset
from impl.policy.setting import difference, out_of_range, setting, settings, texts
from impl.policy.spans import Span

ROOT = Path(__file__).parents[3]
BY_PATH = {each.path: each for each in SETTINGS}


def test_every_field_is_declared_with_a_setting() -> None:
    """No field of a policy, of its limits or of its offload lacks a record, and those of suites have a text."""
    own = {field.name for field in fields(Policy)} - {"memory", "offload"}
    parts = {"memory": MemoryLimits, "offload": Offload}
    assert BY_PATH.keys() == own | {f"{part}.{f.name}" for part, kind in parts.items() for f in fields(kind)}
    assert [path for path, each in BY_PATH.items() if not each.says] == ["inside", "schedule"]
    assert len({each.key for each in SETTINGS}) == len(SETTINGS)


def test_a_setting_knows_its_place_type_and_value() -> None:
    """A setting finds its value in a policy, and reads the texts of a suite."""
    policy = preset("zeropp", memory=MemoryLimits(prefetch=7), offload=Offload(weights=0.5))
    values = [BY_PATH[path].of(policy) for path in ("secondary", "memory.prefetch", "offload.weights")]
    assert values == ["node", 7, 0.5]
    assert BY_PATH["offload.weights"].key == "offload_weights"
    assert BY_PATH["memory.max_live"].kind == int | None
    weights = BY_PATH["weights"]
    assert weights.parsed("int8:64") == parse("int8:64")
    assert weights.parsed(["int8:64", "bf16"]) == (parse("int8:64"), Raw("bf16"))
    assert BY_PATH["chunks"].parsed(2) == 2
    assert BY_PATH["frozen"].parsed("none") is None


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A part with numbers of all kinds of range, and one without."""

    any: int = setting(-7, "any number")
    some: float | None = setting(None, "none, or 0 or more", least=0)
    few: int = setting(1, "1 to 3", least=1, most=3)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({}, {}),
        ({"some": 0.0, "few": 3}, {}),
        ({"some": -0.5}, {"some": "0 or more"}),
        ({"some": float("nan"), "few": 0}, {"some": "0 or more", "few": "1 to 3"}),
        ({"few": 4}, {"few": "1 to 3"}),
    ],
)
def test_numbers_out_of_range_are_found(values: dict[str, float], refused: dict[str, str]) -> None:
    """A number beyond ``least`` or ``most`` is found with its range, and so is NaN; None and both ends are allowed."""
    numbers = Numbers(**values)  # type: ignore[arg-type]
    assert {each.name: each.range for each, _ in out_of_range(numbers)} == refused


def test_labels_and_keys_follow_from_names() -> None:
    """Without a label or a key of its own, a field has its name."""
    assert [(each.key, each.label) for each in settings(Numbers)] == [
        ("any", "any"), ("some", "some"), ("few", "few"),
    ]  # fmt: skip
    assert BY_PATH["loss_scale"].label == "loss scale"


def test_all_ranges_of_a_policy_are_refused_in_one_line() -> None:
    """A policy's error names all its numbers, with the ranges of all of them."""
    with pytest.raises(PolicyError) as caught:
        Policy(refresh=-1)
    assert str(caught.value) == (
        "chunks=1, align=1, order_every=32, refresh=-1: expected chunks 1 to 8, align 1 or more, order_every and "
        "refresh 0 or more"
    )


EXAMPLE = re.compile(r"### How to add a field of a policy\n.*?```python\n(.*?)```", re.DOTALL)
# Replaces the module of policies with one that has one more field, before anything else imports it.
WITH_FIELD = """
import importlib.util, json, sys

spec = importlib.util.find_spec("impl.policy.policy")
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
before, line, after = spec.loader.get_source(spec.name).partition("    align: int = setting(")
exec(compile(before + sys.stdin.read() + line + after, spec.origin, "exec"), module.__dict__)

from docs.tables import suite_keys
from harness.suites.policy_scope import unfitting_changes
from harness.suites.trial import Trial
from impl.adapters.traffic import check_host
from report.data.configuration import label_of


def trial(text, strategy="qwz"):
    return Trial.model_validate({"strategy": strategy, "policy": {"onward": text}})


def error(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)


policy = trial("int8:64").resolved_policy()
print(json.dumps({
    "value": str(policy.onward),
    "none": str(trial("none").resolved_policy().onward),
    "key": error(trial, "int9:64"),
    "label": label_of(trial("int8:64"), {}),
    "left out": unfitting_changes(trial("int8:64", "zero3")),
    "taken": unfitting_changes(trial("int8:64")),
    "host": error(check_host, "fsdp2", policy),
    "ids": [Trial().id, trial("int8:64").id == trial("int8:32").id],
    "canonical": trial("int8:64").canonical()["policy"]["onward"],
    "row": next(row for row in suite_keys.render().splitlines() if "onward" in row),
}))
"""


def test_the_guides_example_adds_a_field_in_one_place() -> None:
    """The declaration of docs/design/engine.md alone makes a suite's key, a name, a refusal and a row of the guide."""
    example = EXAMPLE.search((ROOT / "docs/design/engine.md").read_text(encoding="utf-8"))
    assert example is not None
    done = subprocess.run(
        [sys.executable, "-c", WITH_FIELD], cwd=ROOT, input=example[1], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["value"], found["none"], found["canonical"]) == ("int8:64", "None", "int8:64")
    assert "codec 'int9:64'" in found["key"]
    assert found["label"].endswith("(onward int8:64)")
    assert found["left out"] == {"policy.onward": "it would make another strategy of"}
    assert found["taken"] == {}
    assert found["host"].startswith(
        "onward = int8:64 inside fsdp2: the host decides this itself; expected None"
    )
    assert found["ids"] == ["0dc9ea488555", False]
    assert found["row"] == "| `policy.onward` | codec in which weights go on inside nodes, or `none` | none |"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"stage": 2}, "stage is 3 on ranks 0 and 2, but 2 on rank 1"),
        (
            {"gradients": (parse("int8:64"), BF16)},
            "gradients is bf16 on ranks 0 and 2, but int8:64/bf16 on rank 1",
        ),
        ({"frozen": parse("int8:64")}, "frozen is None on ranks 0 and 2, but int8:64 on rank 1"),
        (
            {"memory": MemoryLimits(pair_below=0)},
            "memory.pair_below is 4000000 on ranks 0 and 2, but 0 on rank 1",
        ),
        (
            {"offload": Offload(weights=1 / 3)},
            f"offload.weights is 0.0 on ranks 0 and 2, but {1 / 3} on rank 1",
        ),
        (
            {"schedule": (Span(until=2, chunks=2), Span())},
            "schedule is none on ranks 0 and 2, but chunks 2 until step 2 on rank 1",
        ),
    ],
)
def test_the_first_setting_in_which_ranks_differ_is_named(changes: dict[str, Any], found: str) -> None:
    """The error names the setting, each value and the ranks that have it; equal policies give none."""
    assert difference([texts(Policy()), texts(Policy())]) is None
    assert texts(Policy()).keys() == BY_PATH.keys()
    assert difference([texts(Policy()), texts(Policy(**changes)), texts(Policy())]) == (
        f"the policies of the ranks differ: {found}, so that the ranks' messages may not match: give all ranks the "
        "same policy"
    )
