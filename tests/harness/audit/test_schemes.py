"""Tests of the closed forms: which scheme sends which messages."""

from __future__ import annotations

from typing import Any

import pytest

from harness.audit.schemes import NONE, Model, Scheme, model_of, recognise
from tests.harness.audit.events import calls_of, events, row

M = 1000
PAIR = ("pair", (0, 1))
REPLICAS = ("replicas", (0, 2))
GROUPS = [PAIR, REPLICAS]
BOTH = ("forward", "backward")


def scheme(rows: list[list[Any]], units: list[dict[str, Any]] | None = None) -> Scheme:
    """The scheme of rank 0 of 2x2 ranks."""
    calls = calls_of([events(0, 4, rows, groups=GROUPS, elements=M, fsdp=units or [])], 2)
    model = model_of(calls)
    assert model is not None
    return recognise(calls, calls.ranks[0], 2, model)


def gather(elements: int, phase: str, **options: Any) -> list[Any]:
    return row("all_gather", elements, phase=phase, **options)


def reduced(elements: int = M, **options: Any) -> list[Any]:
    return row("reduce_scatter", elements, phase="backward", **options)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("DDP", [row("all_reduce", M, phase="backward")]),
        ("DDP", [row("all_reduce", 2 * M, phase="backward", calls=2)]),
        ("ZeRO-3", [gather(M, "forward"), gather(M, "backward"), reduced()]),
        ("ZeRO-3, weights kept for backward", [gather(M, "forward"), reduced()]),
        ("ZeRO-1 or ZeRO-2", [gather(M, "optimizer"), reduced()]),
        ("ZeRO-1 or ZeRO-2", [gather(M, "optimizer"), row("all_reduce", M, phase="backward")]),
        (
            "HSDP of 2 shards",
            [
                *(gather(M, phase, group="pair") for phase in BOTH),
                reduced(group="pair"),
                row("all_reduce", M // 2, phase="backward", group="replicas"),
            ],
        ),
        ("ZeRO-3 with hpZ", [gather(M, "forward"), gather(M, "backward", group="pair"), reduced()]),
        (
            "ZeRO-3 with qwZ, hpZ, qgZ",
            [
                gather(M, "forward", dtype="int8", item=1),
                gather(M, "backward", dtype="int8", item=1, group="pair"),
                row("all_to_all", M // 2, phase="backward", dtype="uint8", item=1),
            ],
        ),
        ("ZeRO-3 with qwZ", [*(gather(M, phase, dtype="int8", item=1) for phase in BOTH), reduced()]),
    ],
)
def test_schemes_by_their_messages(name: str, rows: list[list[Any]]) -> None:
    """Messages of the sizes of a closed form have its name, and small ones are the rest."""
    found = scheme([*rows, row("all_reduce", 1, phase="optimizer")])
    assert found.name == name
    assert found.measured == found.expected > 0
    assert [(term.operation, term.phase, term.measured) for term in found.rest] == [
        ("all_reduce", "optimizer", 4)
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("all_reduce", M * 3 // 2, phase="backward")],
        [gather(M, "forward"), gather(M * 3 // 4, "backward"), reduced()],
        [gather(M, "forward")],
        [row("send", M), row("recv", M)],
        [row("all_reduce", M, phase="backward"), row("send", M)],
    ],
)
def test_messages_of_other_sizes_are_of_no_known_scheme(rows: list[list[Any]]) -> None:
    """Every message is in the table all the same."""
    found = scheme(rows)
    assert found.name == NONE
    assert len(found.terms) + len(found.rest) == len(rows)


def units(**changes: Any) -> list[dict[str, Any]]:
    """A block of 800 elements, padded to 808, and a root of 200 that stays gathered."""
    unit = {
        "elements": 800, "padded": 808, "trained": 808, "shards": 4, "replicas": 1, "gathered_again_in": 4,
        "weights": "bfloat16", "gradients": "float32",
    }  # fmt: skip
    root = unit | {"elements": 200, "padded": 200, "trained": 200, "gathered_again_in": 0}
    return [
        unit | changes,
        root | {name: value for name, value in changes.items() if name != "gathered_again_in"},
    ]


def test_units_of_fsdp2_make_the_closed_form_exact() -> None:
    """Padding, types and the root that stays gathered are in the closed form."""
    rows = [
        gather(1008, "forward", dtype="bfloat16", item=2),
        gather(808, "backward", dtype="bfloat16", item=2),
        reduced(1008),
    ]
    found = scheme(rows, units())
    assert (found.name, found.measured, found.expected) == ("ZeRO-3 (FSDP2)", 7664, 7664)
    kept = scheme([rows[0], rows[2]], units(gathered_again_in=0))
    assert kept.name == "ZeRO-3 (FSDP2, weights kept for backward)"


def test_units_of_fsdp2_with_replicas() -> None:
    """HSDP all-reduces each rank's shard of the gradient."""
    rows = [
        gather(1008, "forward", dtype="bfloat16", item=2, group="pair"),
        gather(808, "backward", dtype="bfloat16", item=2, group="pair"),
        reduced(1008, group="pair"),
        row("all_reduce", 504, phase="backward", group="replicas"),
    ]  # fmt: skip
    found = scheme(rows, units(shards=2, replicas=2, gathered_again_in=2))
    assert (found.name, found.measured) == ("HSDP of 2 shards (FSDP2)", found.expected)


def test_units_that_send_another_type_are_no_fsdp2() -> None:
    """A gather in float32, where the units say bfloat16, is not in the closed form."""
    found = scheme([gather(1008, "forward"), gather(808, "backward"), reduced(1008)], units())
    assert found.name == NONE


def test_the_size_of_the_model() -> None:
    """What --model counted comes first, then FSDP2's units, then the optimizers' parameters."""
    calls = calls_of([events(0, 2, [], elements=7, fsdp=units())])
    assert model_of(calls, 12, "train:build") == Model(12, "train:build")
    assert model_of(calls, M, "train:build") == Model(M, "train:build", tuple(units()))
    assert model_of(calls) == Model(M, "the units of FSDP2", tuple(units()))
    assert model_of(calls_of([events(0, 2, [], elements=7)])) == Model(7, "optimizer AdamW")
    assert model_of(calls_of([events(0, 2, [])])) is None
