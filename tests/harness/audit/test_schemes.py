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


def hop(turn: str, group: tuple[int, ...], nbytes: int, **changes: Any) -> dict[str, Any]:
    """A hop of our engine, as the witness describes it."""
    usual: dict[str, Any] = {
        "turn": turn, "ranks": [*group], "codec": "bf16", "kind": "all_gather", "source": "master",
        "between": group == REPLICAS[1], "unseen": False, "bytes": nbytes, "scales": 0, "each": True,
    }  # fmt: skip
    return usual | changes


def own(rows: list[list[Any]], hops: list[dict[str, Any]]) -> Scheme:
    calls = calls_of([events(0, 4, rows, groups=GROUPS, elements=M, own=hops)], 2)
    model = model_of(calls)
    assert model is not None
    return recognise(calls, calls.ranks[0], 2, model)


def frames(operation: str, nbytes: int, group: str, phase: str = "forward") -> list[Any]:
    return row(operation, nbytes, phase=phase, dtype="uint8", item=1, group=group)


HIERARCHICAL = [
    *(hop(turn, REPLICAS[1], 500) for turn in ("forward", "again", "backward")),
    *(hop(turn, PAIR[1], 1000) for turn in ("forward", "again", "backward")),
    hop("reduction", PAIR[1], 1000, kind="all_to_all"),
    hop("reduction", REPLICAS[1], 500, kind="all_to_all"),
]
INT8, INT4 = {"codec": "int8:2048", "scales": 2}, {"codec": "int4:256", "scales": 8}
OURS = [
    hop("forward", REPLICAS[1], 252, **INT8),
    hop("forward", PAIR[1], 504, **INT8),
    *(hop(turn, PAIR[1], 504, source="copy", **INT8) for turn in ("again", "backward")),
    hop("reduction", PAIR[1], 258, kind="all_to_all", **INT4),
    hop("reduction", REPLICAS[1], 129, kind="all_to_all", **INT4),
]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_messages_of_our_engine_are_those_of_its_hops(micro_batches: int) -> None:
    """Each phase and group is a term; a gather and a reduction over one group in backward share it."""
    sent = [
        ("forward", "replicas", 252),
        ("forward", "pair", 504 * micro_batches),
        ("backward", "replicas", 129 * micro_batches),
        ("backward", "pair", (504 + 258) * micro_batches),
    ]
    rows = [frames(way, size, group, phase) for phase, group, size in sent for way in ("send", "recv")]
    found = own([*rows, row("all_reduce", 1)], OURS)
    assert found.name == "ZeRO++ with qwZ, hpZ, qgZ (this project's engine)"
    assert found.measured == found.expected == sum(size for *_, size in sent)
    assert [term.operation for term in found.rest] == ["all_reduce"]
    assert found.terms[-2].holds == (
        "weights inside nodes as int8:2048 with 0.4% scales; gradients inside nodes as int4:256 with 3.1% scales"
    )


def test_collectives_of_our_engine_hold_the_rank_s_own_part() -> None:
    """A backend with collectives gathers and swaps whole messages: P parts where a rank sends P - 1."""
    rows = [
        frames("all_gather", 2 * size, group, phase)
        for phase in BOTH
        for group, size in (("replicas", 500), ("pair", 1000))
    ]
    rows += [
        frames("all_to_all", 2000, "pair", "backward"),
        frames("all_to_all", 1000, "replicas", "backward"),
    ]
    found = own(rows, HIERARCHICAL)
    assert found.name == "hierarchical ZeRO-3 (this project's engine)"
    assert found.measured == found.expected == 9000


def test_messages_that_differ_from_the_hops_of_our_engine_have_no_name() -> None:
    """A gather of other bytes, a hop that was not sent, and a large message outside of the hops."""
    right = [
        frames("send", 252, "replicas"),
        frames("send", 504, "pair"),
        frames("send", 129, "replicas", "backward"),
        frames("send", 762, "pair", "backward"),
    ]
    assert own(right, OURS).name != NONE
    assert own([frames("send", 300, "replicas"), *right[1:]], OURS).name == NONE
    assert own(right[1:], OURS).name == NONE
    assert own([*right, row("all_reduce", M)], OURS).name == NONE


def test_messages_in_shared_memory_are_left_out() -> None:
    """The terms are those of the hops between nodes."""
    hops = [each | {"unseen": not each["between"]} for each in HIERARCHICAL]
    rows = [frames("send", 500, "replicas"), frames("send", 1000, "replicas", "backward")]
    found = own(rows, hops)
    assert (found.name, found.expected) == ("hierarchical ZeRO-3 (this project's engine)", 1500)


def test_the_size_of_the_model() -> None:
    """What --model counted comes first, then FSDP2's units, then the optimizers' parameters."""
    calls = calls_of([events(0, 2, [], elements=7, fsdp=units())])
    assert model_of(calls, 12, "train:build") == Model(12, "train:build")
    assert model_of(calls, M, "train:build") == Model(M, "train:build", tuple(units()))
    assert model_of(calls) == Model(M, "the units of FSDP2", tuple(units()))
    assert model_of(calls_of([events(0, 2, [], elements=7)])) == Model(7, "optimizer AdamW")
    assert model_of(calls_of([events(0, 2, [])])) is None
