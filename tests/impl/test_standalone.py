"""The collectives by themselves: any shape, any length, any codec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.codec import Codec, CodecError
from impl.mesh import Mesh
from impl.noise import Key
from impl.policy import PolicyError
from impl.standalone import quantized_all_gather, quantized_reduce_scatter
from impl.topology import Topology
from impl.wire import Wire
from tests.ranks import on_processes, on_threads
from tests.strategies import engine_codecs, raw_codecs, topologies

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


def _misused(mesh: Mesh, how: str) -> None:
    match how:
        case "shape":
            quantized_reduce_scatter(torch.zeros(7), "bf16", mesh)
        case "type":
            quantized_all_gather(torch.zeros(8, dtype=torch.int64), "bf16", mesh)
        case "codec":
            quantized_all_gather(torch.zeros(8), "int9:8", mesh)
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
        ("noise", ValueError, "rounds stochastically: it needs noise"),
        ("policy", PolicyError, "has one hop"),
    ],
)
def test_misuse_is_one_clear_line(how: str, error: type[Exception], words: str) -> None:
    """What cannot be done raises before anything is sent, naming the numbers."""
    with pytest.raises(error, match=words):
        on_threads(Topology(1, 2), _misused, how)
