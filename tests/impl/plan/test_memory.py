"""Predicted memory agrees with the paper's and DeepSpeed's formulas."""

from __future__ import annotations

import csv
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.plan.memory import memory, secondary_either_way
from impl.plan.prefetch_schedule import MOST_AHEAD, kept_units
from impl.plan.traffic import predict
from impl.policy.policy import MemoryLimits, Offload, Policy
from impl.policy.presets import preset
from impl.policy.shard_layout import FROZEN, ParameterSpec, UnitGeometry, lay_out
from impl.policy.topology import Topology

PUBLISHED = Path(__file__).parents[3] / "report" / "published"


def test_memory_of_states_is_that_of_zeros_table() -> None:
    """The 45 numbers of table 1 of ZeRO's paper: 4, 2 and 0 bytes a parameter, and 12, 14 and 16 over the ranks.

    At stage 3 this engine has the same: fp32 masters, mean gradients and Adam's states, where the paper counts
    16-bit weights and gradients in addition to fp32 masters.  Below stage 3 its mean gradient is fp32 too, and with
    several micro-batches stage 1 adds up in fp32.
    """
    beside = {1: (2, 4), 2: (0, 2), 3: (0, 0)}  # extra bytes a parameter, and extra bytes over the ranks
    with (PUBLISHED / "zero_memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 45
    for row in rows:
        stage, ranks = int(row["stage"]), int(row["data_parallel_ranks"])
        topology, numel = Topology(ranks // 4, 4), round(float(row["parameters_billion"]) * 1e9)
        unit = lay_out("u", [ParameterSpec("w", (numel,))], grain=1, world=ranks, max_padding=0.001)
        policy = preset("zero3" if stage == 3 else f"zero{stage}", compute="bf16")
        parts = memory(policy, topology, [unit], micro_batches=1 if stage == 3 else 2)
        names = ["masters", "gradients", "optimizer"]
        names += {1: ["gathered", "local_gradients"], 2: ["gathered"], 3: []}[stage]
        whole, shared = beside[stage]
        predicted = (sum(parts[name] for name in names) - whole * numel - shared * numel / ranks) / 1e9
        assert predicted == pytest.approx(float(row["gb_per_gpu"]), rel=0.005, abs=0.005), row


def test_hpzs_copy_in_16_bits_takes_the_papers_bytes() -> None:
    """Figure 4's 100 B parameters on 64 nodes of 16 ranks take 12.5 GB a rank in 16 bits (facts A4)."""
    topology, numel = Topology(64, 16), 100 * 10**9
    unit = lay_out("u", [ParameterSpec("w", (numel,))], grain=2048, world=1024, max_padding=0.001)
    released = MemoryLimits(max_reuse=0)
    frames, halves = (preset("zeropp", secondary_format=kept, memory=released) for kept in ("frames", "bf16"))
    assert secondary_either_way(frames, topology, [unit]) == secondary_either_way(halves, topology, [unit])
    predicted = secondary_either_way(frames, topology, [unit])
    held = tuple(memory(policy, topology, [unit])["secondary"] for policy in (frames, halves))
    assert held == predicted
    assert held[1] == pytest.approx(2 * numel / 16, rel=1e-4)
    assert held[1] / held[0] == pytest.approx(2 / (1 + 4 / 2048), rel=1e-3)
    assert secondary_either_way(preset("qwz"), topology, [unit]) is None
    small, where = replace(unit, padded=2048 * 4, world=4), Topology(2, 2)
    sent = [predict(policy, where, [small], 0, ["forward", "backward"]).sent for policy in (frames, halves)]
    backward = [
        {key.link: nbytes for key, (nbytes, _) in book.items() if key[:2] == ("backward", "weights")}
        for book in sent
    ]
    assert backward == [{"intra": 2 * (2048 + 16)}, {"intra": 2 * 2 * 2048}]
    forward = [{key: book[key] for key in book if key.phase == "forward"} for book in sent]
    assert forward[0] == forward[1]


@pytest.mark.parametrize(
    ("offload", "device", "host"),
    [(Offload(), 16, 0), (Offload(optimizer=1), 2, 18), (Offload(optimizer=1, weights=1), 0, 18)],
    ids=str,
)
def test_memory_beside_deepspeeds_estimator(offload: Offload, device: int, host: int) -> None:
    """Bytes of states per parameter, divided by the ranks, at stage 3 (facts B2, without its buffer factor of 1.5).

    DeepSpeed has 18 on the device; with the optimizer offloaded 2 on the device and 16 on the host; with parameters
    offloaded too, 0 and 18.  This engine keeps no 16-bit shard or gradients in addition to the fp32 ones, so it has
    16.  With offload the host also keeps the frame that is sent (2), and the device two mean gradients that are
    being copied.
    """
    topology, numel = Topology(2, 4), 1 << 20
    unit = lay_out("u", [ParameterSpec("w", (numel,))], grain=32, world=8, max_padding=0)
    parts = memory(preset("zero3", compute="bf16", offload=offload), topology, [unit])
    states = ("masters", "gradients", "optimizer", "frames", "secondary")
    assert sum(parts[part] for part in states) == device * numel // 8
    assert sum(size for part, size in parts.items() if part.startswith("host_")) == host * numel // 8
    assert parts["staging"] == (2 * 4 * numel // 8 if offload.optimizer else 0)
    assert parts["gathered"] + parts["local_gradients"] == 4 * numel  # its 4 L: the largest layer, twice


def _units(world: int, **sizes: int) -> list[UnitGeometry]:
    """Units of these sizes; a name with a trailing underscore is that of a block's frozen unit."""
    named = {name.replace("_", FROZEN): size for name, size in sizes.items()}
    return [
        lay_out(
            name,
            [ParameterSpec("w", (size,))],
            grain=1,
            world=world,
            max_padding=0,
            trainable=not name.endswith(FROZEN),
        )
        for name, size in named.items()
    ]


SEVEN = _units(4, root=640, a=64, b=128, c=6400, d=256, e=512, f=64)


def over(transport: str, topology: Topology) -> dict[str, Any]:
    """The arguments of memory() that say where messages arrive."""
    within = {
        "gloo": lambda _: True,
        "shm": topology.crosses,
        "threads": lambda _: False,
        "nccl": lambda _: False,
    }
    return {"in_place": within[transport], "streams": transport == "nccl"}


@pytest.mark.parametrize(
    ("limits", "elements"),
    [
        ({"prefetch": 0}, 640 + 6400),
        ({"prefetch": 1}, 640 + 6400 + 256),  # with c the block d, in forward
        ({"prefetch": 1000}, 640 + 6400 + 256 + 512 + 64),  # with c all blocks after it
        ({"prefetch": 10**9}, 640 + 64 + 128 + 6400 + 256 + 512),  # with a the four blocks after it
        ({"prefetch": 10**9, "max_live": 0}, 640 + 6400),
        ({"prefetch": 10**9, "max_live": 7700}, 640 + 64 + 128 + 6400 + 256),  # with a all up to d
        ({"prefetch": 0, "max_reuse": 10**9}, 640 + 64 + 128 + 6400 + 256 + 512 + 64),
        ({"prefetch": 1, "max_reuse": 1000}, 640 + 6400 + 256),  # e and f stay, after c
    ],
    ids=str,
)
@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_units_gathered_ahead_are_counted(transport: str, limits: dict[str, int], elements: int) -> None:
    """Messages that arrive in the weights' memory take it when the gather starts, at most four blocks ahead."""
    policy = preset("exact", memory=replace(MemoryLimits(max_reuse=0, pair_below=0), **limits))
    topology = Topology(1, 4)
    assert memory(policy, topology, SEVEN, **over(transport, topology))["gathered"] == 4 * elements
    assert memory(policy, topology, SEVEN)["gathered"] == 4 * _without_prefetch(policy, SEVEN)


@pytest.mark.parametrize(
    ("policy", "topology", "transport", "early"),
    [
        (preset("exact"), Topology(1, 4), "gloo", True),
        (preset("exact"), Topology(1, 4), "shm", False),  # read in shared memory
        (preset("exact"), Topology(4, 1), "shm", True),
        (preset("exact"), Topology(2, 2), "gloo", False),  # two hops
        (preset("exact", gather="flat"), Topology(2, 2), "gloo", True),
        (preset("exact", gather="flat"), Topology(2, 2), "shm", True),
        (preset("exact", group="node"), Topology(2, 2), "gloo", True),
        (preset("exact", group="node"), Topology(2, 2), "shm", False),
        (preset("zero3"), Topology(1, 4), "gloo", False),  # bf16 is decoded into fp32
        (preset("zero3", compute="bf16"), Topology(1, 4), "gloo", True),
        (preset("zeropp"), Topology(2, 2), "gloo", False),
        (preset("zeropp"), Topology(2, 2), "nccl", True),
        (preset("exact"), Topology(1, 1), "threads", True),  # masters are cast at once
        (preset("exact", offload=Offload(optimizer=1, weights=1)), Topology(1, 4), "gloo", True),
    ],
    ids=str,
)
def test_what_takes_memory_ahead_depends_on_hops_and_transport(
    policy: Policy, topology: Topology, transport: str, early: bool
) -> None:
    """Gathers with messages to decode take the weights' memory only when the host has waited for them."""
    policy = replace(policy, memory=MemoryLimits(max_reuse=0, max_padding=1e9, pair_below=0))
    units = _units(topology.world, root=64, a=128, b=128, c=128, d=128, e=128, f=128)
    units = [replace(unit, padded=1 << 14) for unit in units]  # whole blocks of every codec
    held = memory(policy, topology, units, **over(transport, topology))["gathered"]
    wanted = {False: _without_prefetch(policy, units), True: (1 + 1 + MOST_AHEAD) << 14}
    assert held == {"fp32": 4, "bf16": 2}[policy.compute] * wanted[early]


def test_pairs_are_counted_together() -> None:
    """On streams, with a pair of small units the pass holds its second unit, and the next pair."""
    units = _units(4, root=640, a=64, b=128, c=192, d=256, e=512)
    gathered = {}
    for pair_below in (0, 10**6):
        limits = MemoryLimits(max_reuse=0, prefetch=512, pair_below=pair_below)
        gathered[pair_below] = memory(preset("exact", memory=limits), Topology(1, 4), units, streams=True)[
            "gathered"
        ]
    assert gathered == {0: 4 * (640 + 192 + 256 + 512), 10**6: 4 * (640 + 128 + 192 + 256 + 512)}


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(0, 9),
    st.integers(0, 50),
    st.none() | st.integers(0, 50),
    st.booleans(),
)
def test_without_prefetch_the_walk_is_a_closed_form(
    blocks: Sequence[tuple[int, int]], root: int, reuse: int, live: int | None, backward: bool
) -> None:
    """One block at a time, or the blocks that stay, or a block with the frozen unit of the block after it."""
    sizes = {"root": root} if root else {}
    for number, (trained, frozen) in enumerate(blocks):
        sizes |= {f"b{number}": trained} | ({f"b{number}_": frozen} if frozen else {})
    policy = preset("exact", memory=MemoryLimits(prefetch=0, max_reuse=reuse, max_live=live))
    units = _units(1, **sizes)
    units = [replace(unit, world=2, padded=2 * unit.padded) for unit in units]
    held = memory(policy, Topology(2, 1), units, backward=backward, in_place=lambda _: True)["gathered"]
    assert held == 4 * _without_prefetch(policy, units, backward=backward)


def _without_prefetch(policy: Policy, units: Sequence[UnitGeometry], *, backward: bool = True) -> int:
    """Elements of the outer units, and of the blocks that stay gathered or of the largest block."""
    whole, frozen = Counter[str](), Counter[str]()
    for unit in units:
        if not unit.outer:
            whole[unit.block] += unit.padded
            frozen[unit.block] += unit.padded if backward and not unit.trainable else 0
    together = map(operator.add, whole.values(), [*list(frozen.values())[1:], 0])
    kept = sum(units[index].padded for index in kept_units(policy, units) if not units[index].outer)
    return sum(unit.padded for unit in units if unit.outer) + max([*together, kept if backward else 0])
