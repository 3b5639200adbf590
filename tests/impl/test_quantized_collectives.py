"""The collectives by themselves: any shape, any length, any codec."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl import ops
from impl.codecs.codec import Codec, CodecError, parse
from impl.codecs.reference import random_bits
from impl.codecs.rounding_noise import Key, Noise
from impl.comm import reduce_scatter
from impl.comm.mesh import Mesh
from impl.comm.reduce_scatter import Reduction
from impl.comm.wire import Wire
from impl.plan.policy import Policy, PolicyError
from impl.plan.topology import Topology
from impl.plan.traffic import Tag
from impl.quantized_collectives import quantized_all_gather, quantized_reduce_scatter
from tests.support.philox import bits_of
from tests.support.ranks import on_processes, on_threads
from tests.support.strategies import engine_codecs, raw_codecs, topologies

KEY = Key(1, 2, 0, "mine", "gradients")


def values(rank: int, *shape: int) -> torch.Tensor:
    """A rank's tensor."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def bound(codec: Codec, top: float) -> float:
    """Largest error of one encoding of values up to ``top``."""
    return codec.error_bound(-top, top)


def _gathered(mesh: Mesh, codec: Codec, gather: str, shape: tuple[int, ...]) -> torch.Tensor:
    return quantized_all_gather(values(mesh.rank, *shape), codec, mesh, gather=gather, key=KEY)


@given(
    topologies(6),
    st.one_of(raw_codecs, engine_codecs),
    st.sampled_from(["flat", "hierarchical"]),
    st.sampled_from([(), (0,), (1,), (7,), (33, 3), (2, 3, 50)]),
)
def test_a_gather_is_within_the_codecs_bound_and_equal_everywhere(
    topology: Topology, codec: Codec, gather: str, shape: tuple[int, ...]
) -> None:
    """Every rank gets every rank's tensor, of any shape, within one encoding's error, bit-equal."""
    results = on_threads(topology, _gathered, codec, gather, shape)
    wanted = torch.stack([values(rank, *shape) for rank in range(topology.world)])
    for got in results:
        assert got.shape == wanted.shape
        assert torch.equal(got, results[0])
        if got.numel():
            assert (got - wanted).abs().max() <= bound(codec, wanted.abs().max().item())


def _scattered(mesh: Mesh, codec: Codec, options: dict, shape: tuple[int, ...]) -> torch.Tensor:
    x = values(mesh.rank, mesh.topology.world * shape[0], *shape[1:])
    return quantized_reduce_scatter(x, codec, mesh, key=KEY, **options)


@given(
    topologies(6),
    st.one_of(raw_codecs, engine_codecs),
    st.sampled_from([{"reduce": "two_hop"}, {"reduce": "one_hop", "op": "sum"}, {"reduce": "ring"}]),
    st.sampled_from([(0,), (1,), (7,), (33, 3), (2, 3, 50)]),
)
def test_a_reduction_is_the_mean_within_the_bound_of_its_hops(
    topology: Topology, codec: Codec, options: dict, shape: tuple[int, ...]
) -> None:
    """Every rank gets its part of the mean, or sum, of tensors of any shape."""
    world = topology.world
    results = on_threads(topology, _scattered, codec, options, shape)
    everything = torch.stack([values(rank, world * shape[0], *shape[1:]) for rank in range(world)])
    wanted = everything.double().sum(0) if "op" in options else everything.double().mean(0)
    if wanted.numel() == 0:
        return
    top = world * (everything.abs().max().item() + bound(codec, everything.abs().max().item()))
    error = 2 * bound(codec, top) * (world if "op" in options else 1) + 1e-4
    got = torch.cat(results).double()
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= error


def _chunked(mesh: Mesh) -> bool:
    x = values(mesh.rank, mesh.topology.world * 200, 5)
    whole, cut = (
        quantized_reduce_scatter(x, ("int8:64:stochastic", "int4:32"), mesh, chunks=chunks, key=KEY)
        for chunks in (1, 4)
    )
    return torch.equal(whole, cut)


def test_chunks_change_no_bit() -> None:
    """Cutting a tensor into chunks whose hops overlap gives the same bits."""
    assert all(on_threads(Topology(2, 3), _chunked))


def _in_processes(mesh: Mesh) -> tuple[bool, int]:
    wire = Wire(mesh, transport="shm")
    gathered = quantized_all_gather(torch.full((40,), float(mesh.rank)), "int8:8", mesh, wire=wire)
    mean = quantized_reduce_scatter(torch.full((160, 2), 2.0**mesh.rank), "bf16", mesh, wire=wire)
    right = torch.equal(gathered, torch.arange(4.0).view(4, 1).expand(4, 40))
    return right and torch.equal(mean, torch.full((40, 2), 15 / 4)), wire.ledger.total("inter")


def test_they_run_on_processes_with_shared_memory() -> None:
    """On real processes the values are right, and a passed wire keeps the ledger of both."""
    gather = 48 + 32  # 40 codes padded to 16 bytes, 5 scales padded
    for right, sent in on_processes(Topology(2, 2), _in_processes):
        assert right
        assert sent == gather + 80 * 2


def _in_place(mesh: Mesh, transport: str) -> tuple[bool, bool, bool]:
    """Raw frames of the tensors' own type travel from and to where they lie; nothing else changes."""
    wire = Wire(mesh, transport=transport)
    out, whole = torch.empty(4, 64), values(mesh.rank, 4 * 64)
    kept = whole.clone()
    given = quantized_all_gather(values(mesh.rank, 64), "fp32", mesh, wire=wire, out=out)
    mean = quantized_reduce_scatter(whole, "fp32", mesh, wire=wire)
    every = torch.stack([values(rank, 4 * 64).view(4, 64)[mesh.rank] for rank in range(4)])
    gathered = torch.stack([values(rank, 64) for rank in range(4)])
    total = every[0] + every[1] + every[2] + every[3]
    return given is out, torch.equal(out, gathered), torch.equal(mean, total / 4) and torch.equal(whole, kept)


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(4, 1)], ids=str)
def test_raw_tensors_are_sent_from_where_they_lie(topology: Topology, transport: str) -> None:
    """On gloo and in shared memory, values arrive in ``out``, sums are exact, inputs stay as they were."""
    assert on_processes(topology, _in_place, transport) == [(True, True, True)] * 4


def _off(mesh: Mesh, options: dict, codec: str) -> torch.Tensor:
    """Errors of the mean of equal tensors, in steps of the codec; every draw has another key."""
    x = (torch.rand(512, generator=torch.Generator().manual_seed(0)) * 6.5).repeat(mesh.topology.world)
    x[::64] = 7.0  # int4:64 has steps of 1
    means = [
        quantized_reduce_scatter(x, codec, mesh, key=replace(KEY, step=step), **options) for step in range(8)
    ]
    return torch.stack(means) - x[:512]


@pytest.mark.parametrize("topology", [Topology(1, 8), Topology(8, 1)], ids=str)
def test_ranks_draw_noise_of_their_own(topology: Topology) -> None:
    """The mean over 8 ranks errs like a mean of 8 draws: with shared noise it would err 2.8 times as much."""
    off = torch.stack(on_threads(topology, _off, {"reduce": "one_hop"}, "int4:64:stochastic"))
    one = (1 / 6) ** 0.5  # of one draw, in steps, for values uniform between two codes
    assert 0.9 * one / 8**0.5 < off.std() < 1.1 * one / 8**0.5


def _hop_noise(mesh: Mesh, hop: int, start: int) -> list[list[int]]:
    """Random bits of the first 8 elements of each row that a hop encodes, with shards of 20 elements."""
    codec = parse("int4:8:stochastic")
    how = Reduction(
        wire=Wire(mesh),
        hops=Policy(gradients=(codec, codec)).reduce_axes(mesh.topology),
        tag=Tag("backward", "gradients"),
        piece=20,
    )
    noise = how.noise(replace(KEY, source=mesh.rank), hop, start)
    assert noise is not None
    sizes = torch.Size([axis.size for axis, _ in how.hops[hop:]])
    return random_bits(noise, sizes, 8, mesh.device).flatten(0, -2).tolist()


@pytest.mark.parametrize("start", [0, 16])
def test_noise_follows_the_number_of_the_element(start: int) -> None:
    """Each hop's bits are those of (hop, source, element of the unit), whatever rows it encodes."""
    topology = Topology(3, 2)
    apart = 24  # a shard of 20 elements takes whole octets
    for hop in (0, 1):
        for rank, rows in enumerate(on_threads(topology, _hop_noise, hop, start)):
            noise = replace(KEY, hop=hop, source=rank).noise()
            mine = [d for d in range(6) if hop == 0 or d % 2 == rank % 2]
            mine.sort(key=lambda d: (d % 2, d // 2))  # (local, node): the order in which rows are sent
            wanted = [[bits_of(noise, d * apart + start + i) for i in range(8)] for d in mine]
            assert rows == wanted


def _ring_draws(mesh: Mesh) -> list[tuple[int, int]]:
    """(hop, first element) of every encoding of a ring, as its noise says."""
    drawn, encode = [], ops.encode

    def note(codec: Codec, x: torch.Tensor, frames: torch.Tensor, *, noise: Noise | None = None) -> None:
        assert noise is not None
        keys = [replace(KEY, hop=hop, source=mesh.rank).noise().words for hop in range(4)]
        drawn.append((keys.index(noise.words), noise.start))
        encode(codec, x, frames, noise=noise)

    x = values(mesh.rank, 4 * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce_scatter.ops, "encode", note)
        quantized_reduce_scatter(x, "int4:8:stochastic", mesh, reduce="ring", key=KEY)
    return drawn


def test_a_ring_draws_anew_at_every_step() -> None:
    """Step k of a ring draws bits of hop k for the shard that it passes on."""
    (topology, world) = Topology(1, 1), 4
    assert on_threads(topology, _ring_draws) == [[]]
    for rank, drawn in enumerate(on_processes(Topology(1, world), _ring_draws)):
        assert drawn == [(step, (rank - 1 - step) % world * 24) for step in range(world - 1)]


def _misused(mesh: Mesh, how: str) -> None:
    match how:
        case "shape":
            quantized_reduce_scatter(torch.zeros(7), "bf16", mesh)
        case "type":
            quantized_all_gather(torch.zeros(8, dtype=torch.int64), "bf16", mesh)
        case "codec":
            quantized_all_gather(torch.zeros(8), "int9:8", mesh)
        case "op":
            quantized_reduce_scatter(torch.zeros(8), "bf16", mesh, op="avg")
        case "reduce":
            quantized_reduce_scatter(torch.zeros(8), "bf16", mesh, reduce="twohop")
        case "gather":
            quantized_all_gather(torch.zeros(8), "bf16", mesh, gather="falt")
        case "codecs":
            quantized_reduce_scatter(torch.zeros(8), ["bf16", "bf16", "fp32"], mesh)
        case "own":
            quantized_all_gather(torch.zeros(8), object(), mesh)  # type: ignore[arg-type]
        case "own, reduced":
            quantized_reduce_scatter(torch.zeros(8), object(), mesh)  # type: ignore[arg-type]
        case "out":
            quantized_all_gather(torch.zeros(8), "bf16", mesh, out=torch.zeros(8, 2).t())
        case "noise":
            quantized_all_gather(torch.zeros(8), "int8:8:stochastic", mesh)
        case _:
            quantized_reduce_scatter(torch.zeros(8), ("bf16", "fp32"), mesh, reduce="ring")


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("shape", ValueError, r"2 ranks cannot share \(7,\)"),
        ("type", ValueError, "take fp32, bf16, fp16, got torch.int64"),
        ("codec", CodecError, "2 to 8 bits"),
        ("out", ValueError, r"out holds \(2, 8\) torch.float32 side by side, got \(2, 8\)"),
        ("noise", ValueError, "int8:8:stochastic rounds stochastically: it needs a key"),
        ("op", ValueError, "op = 'avg': expected mean or sum"),
        ("reduce", PolicyError, "reduce = 'twohop'"),
        ("gather", PolicyError, "gather = 'falt'"),
        ("codecs", ValueError, "one for each of two hops, got 3"),
        ("own", TypeError, "is a object: expected its text"),
        ("own, reduced", TypeError, "is a object: expected its text"),
        ("policy", PolicyError, "has one hop"),
    ],
)
def test_misuse_is_one_clear_line(how: str, error: type[Exception], words: str) -> None:
    """What cannot be done raises before anything is sent, naming the numbers."""
    with pytest.raises(error, match=words):
        on_threads(Topology(1, 2), _misused, how)
