"""Tests of the quantised collectives alone, with tensors of any shape and any codec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl import ops
from impl.codecs.codec import Codec, CodecError, parse
from impl.codecs.reference import random_bits
from impl.codecs.rounding_noise import Clock, Key, Noise, shard_stride
from impl.comm import reduce_scatter
from impl.comm.mesh import Mesh
from impl.comm.reduce_scatter import reduction_of
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.policy import Policy, PolicyError
from impl.policy.topology import Topology
from impl.quantized_collectives import quantized_all_gather, quantized_reduce_scatter
from tests.impl.codecs.test_reference import through
from tests.impl.comm.test_reduce_scatter import reduced
from tests.support.philox import bits_of
from tests.support.ranks import each_rank, on_processes, on_threads
from tests.support.strategies import engine_codecs, raw_codecs, topologies

KEY = Key(1, 2, 0, "mine", "gradients")


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@given(
    topologies(6),
    st.one_of(raw_codecs, engine_codecs),
    st.sampled_from(["flat", "hierarchical"]),
    st.sampled_from([(), (0,), (1,), (7,), (33, 3), (2, 3, 50)]),
)
def test_a_gather_is_every_ranks_tensor_bit_equal_everywhere(
    topology: Topology, codec: Codec, gather: str, shape: tuple[int, ...]
) -> None:
    """All ranks get every rank's tensor in rank order, with the same bits, encoded and decoded once."""

    def gathered(mesh: Mesh) -> torch.Tensor:
        return quantized_all_gather(values(mesh.rank, *shape), codec, mesh, gather=gather, key=KEY)

    results = on_threads(topology, gathered)
    for rank in range(topology.world):
        x = values(rank, *shape).view(-1)
        wanted = through(codec, x, KEY.noise(rank * shard_stride(x.numel()))).view(shape)
        assert all(torch.equal(got[rank], wanted) for got in results)


@given(
    topologies(6),
    st.one_of(raw_codecs, engine_codecs),
    st.sampled_from(["two_hop", "one_hop", "ring"]),
    st.sampled_from([(0,), (1,), (7,), (33, 3), (2, 3, 50)]),
)
def test_a_reduction_is_that_of_the_engine(
    topology: Topology, codec: Codec, reduce: Any, shape: tuple[int, ...]
) -> None:
    """Every rank gets its part of the mean, with the bits that the engine's reduction gives."""

    def scattered(mesh: Mesh) -> None:
        x = values(mesh.rank, mesh.topology.world * shape[0], *shape[1:])
        key = Clock(7).gradients("u", 0)
        got = quantized_reduce_scatter(x, codec, mesh, reduce=reduce, key=key)
        assert got.shape == shape
        if got.numel():
            policy = Policy(gradients=(codec, codec), reduce=reduce)
            assert torch.equal(got.view(-1), reduced(mesh, policy, x.view(-1)))

    on_threads(topology, scattered)


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(4, 1)], ids=str)
@each_rank(processes=True)
def test_raw_tensors_arrive_exactly(mesh: Mesh, topology: Topology, transport: str) -> None:
    """On processes values arrive in ``out``, sums are exact, inputs unchanged, and the wire books both."""
    wire = Wire(mesh, transport=transport)
    out, whole = torch.empty(4, 64), values(mesh.rank, 4 * 64)
    original = whole.clone()
    assert quantized_all_gather(values(mesh.rank, 64), "fp32", mesh, wire=wire, out=out) is out
    assert torch.equal(out, torch.stack([values(rank, 64) for rank in range(4)]))
    mean = quantized_reduce_scatter(whole, "fp32", mesh, wire=wire)
    terms = [values(rank, 4 * 64).view(4, 64)[mesh.rank] for rank in range(4)]
    assert torch.equal(mean, sum(terms) / 4)
    assert torch.equal(whole, original)
    crossed = [wire.ledger.total(link) for link in ("inter", "intra")]
    assert sorted(crossed) == [0, 2 * 3 * 64 * 4]  # of both, three ranks' 64 values of 4 bytes


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("start", [0, 16])
@each_rank(3, 2)
def test_noise_follows_the_number_of_the_element(mesh: Mesh, hop: int, start: int) -> None:
    """Random bits depend on hop, source and the element's number in the unit, whatever rows a hop encodes."""
    codec, stride = parse("int4:8:stochastic"), 24  # a shard of 20 elements takes whole octets
    policy, tag = Policy(gradients=(codec, codec)), Tag("backward", "gradients")
    reduction = reduction_of(policy, Wire(mesh), tag, 20, policy.grain)
    noise = reduction.noise(replace(KEY, source=mesh.rank), hop, start)
    sizes = torch.Size([each.axis.size for each in reduction.hops[hop:]])
    rows = random_bits(noise, sizes, 8, mesh.device).flatten(0, -2).tolist()
    whole = replace(KEY, hop=hop, source=mesh.rank).noise()
    targets = [d for d in range(6) if hop == 0 or d % 2 == mesh.rank % 2]
    targets.sort(key=lambda d: (d % 2, d // 2))  # (local, node): the order in which rows are sent
    assert rows == [[bits_of(whole, d * stride + start + i) for i in range(8)] for d in targets]


def _ring_draws(mesh: Mesh) -> None:
    drawn, encode, world = [], ops.encode, mesh.topology.world

    def note(codec: Codec, x: torch.Tensor, frames: torch.Tensor, *, noise: Noise | None = None) -> None:
        keys = [replace(KEY, hop=hop, source=mesh.rank).noise().philox for hop in range(4)]
        drawn.append((keys.index(noise.philox), noise.start))
        encode(codec, x, frames, noise=noise)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce_scatter.ops, "encode", note)
        quantized_reduce_scatter(values(mesh.rank, 80), "int4:8:stochastic", mesh, reduce="ring", key=KEY)
    assert drawn == [(step, (mesh.rank - 1 - step) % world * 24) for step in range(world - 1)]


def test_a_ring_draws_anew_at_every_step() -> None:
    """Step k of a ring draws the bits of hop k for the shard that it sends."""
    on_threads(Topology(1, 1), _ring_draws)
    on_processes(Topology(1, 4), _ring_draws)


def layouts(rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of many layouts by name, whose first dimension 2 and 4 ranks can share."""
    x = values(rank, 2, 8, 6, 10).to(dtype)
    wide, line = x[0, :, 0, :], x.flatten()[:64]
    waves = torch.complex(values(rank, 8, 3), values(rank + 9, 8, 3))
    whole = {
        "columns [:, ::2]": wide[:, ::2],
        "columns [:, 2:7]": wide[:, 2:7],
        "rows [::2]": x.view(16, 60)[::2],
        "one dimension [::2]": line[::2],
        "one dimension [1::4]": line[1::4],
        "from element 3 on": line[3:19],
        "transposed": values(rank, 5, 8).to(dtype).t(),
        "permuted": x[0].permute(0, 2, 1),
        "channels last": x.view(8, 3, 4, 10).contiguous(memory_format=torch.channels_last),
        "expanded rows": wide[:1].expand(8, 10),
        "expanded columns": wide[:, :1].expand(8, 6),
        "expanded from one": x[0, 0, 0, :1].expand(8),
        "overlapping windows": line.unfold(0, 5, 3)[:8],
        "a diagonal": x.view(8, 120).diagonal(),
        "an empty tensor": x[0, :, :0],
        "an empty transposed tensor": x[0, :, 0, :0].t()[:, ::2],
        "a parameter": torch.nn.Parameter(values(rank, 8, 3).to(dtype)),
        "transposed, with gradients": values(rank, 3, 8).to(dtype).requires_grad_().t(),
        "of inference mode": _inferred(values(rank, 3, 8).to(dtype)).t(),
    }
    if dtype == torch.float32:
        whole |= {
            "imaginary part": waves.imag,
            "imaginary part of a conjugate": waves.conj().imag,
            "imaginary part of a conjugate, transposed": waves.t().conj().imag.t(),
            "real part of a conjugate": waves.conj().real,
            "contiguous and negated": torch._neg_view(values(rank, 8, 3)),
            "strided and negated": torch._neg_view(values(rank, 8, 6)[:, ::2]),
        }
    return whole


def _inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


LAYOUT_CODECS = ("fp32", "bf16", "int8:64", "int5:7:asym")
OWN = "tests.impl.codecs.test_own_codec:Sixteenths"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(2, 2)], ids=str)
@each_rank()
def test_every_layout_is_sent_as_its_contiguous_copy(
    mesh: Mesh, topology: Topology, dtype: torch.dtype
) -> None:
    """Strided, expanded, overlapping and negated views give the bits of their contiguous copies."""
    wire = Wire(mesh)
    for name, x in layouts(mesh.rank, dtype).items():
        copy = (x.detach() + 0).clone(memory_format=torch.contiguous_format)
        assert copy.is_contiguous()
        assert not copy.is_neg()
        before = copy.clone()
        for codec in LAYOUT_CODECS:
            for gather in ("flat", "hierarchical"):
                got, wanted = (
                    quantized_all_gather(value, codec, mesh, gather=gather, wire=wire) for value in (x, copy)
                )
                assert got.is_contiguous(), (name, codec, gather)
                assert torch.equal(got, wanted), (name, codec, gather)
            for reduce in ("two_hop", "one_hop", "ring"):
                got, wanted = (
                    quantized_reduce_scatter(value, codec, mesh, reduce=reduce, wire=wire)
                    for value in (x, copy)
                )
                assert torch.equal(got, wanted), (name, codec, reduce)
        assert torch.equal(x.detach() + 0, before), name


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("codec", ["int4:8:stochastic", OWN])
@each_rank(2, 2)
def test_layouts_do_not_change_random_bits_nor_users_codecs(mesh: Mesh, codec: str, chunks: int) -> None:
    """Chunks, random bits and users' codecs get the values in row-major order."""
    for name, x in layouts(mesh.rank, torch.float32).items():
        copy = (x.detach() + 0).clone(memory_format=torch.contiguous_format)
        key = KEY if "stochastic" in codec else None
        got, wanted = (
            quantized_reduce_scatter(value, codec, mesh, chunks=chunks, key=key) for value in (x, copy)
        )
        assert torch.equal(got, wanted), name
        got, wanted = (quantized_all_gather(value, codec, mesh, key=key) for value in (x, copy))
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8:8"])
@pytest.mark.parametrize("gather", ["flat", "hierarchical"])
@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(2, 2)], ids=str)
@each_rank()
def test_a_gather_may_read_from_the_tensor_that_it_writes(
    mesh: Mesh, topology: Topology, codec: str, gather: Any
) -> None:
    """A row of ``out``, or a part across two rows, is read before it is overwritten."""
    world, size = topology.world, 8
    wanted = quantized_all_gather(values(mesh.rank, size), codec, mesh, gather=gather)
    for start in (0, size, mesh.rank * size, mesh.rank * size + 3 * (mesh.rank + 1 < world), 3):
        out = torch.zeros(world, size)
        x = out.view(-1)[start : start + size]
        x.copy_(values(mesh.rank, size))
        assert quantized_all_gather(x, codec, mesh, gather=gather, out=out) is out
        assert torch.equal(out, wanted), start


@each_rank(1, 2)
def test_a_gather_writes_into_a_parameter_where_gradients_are_off(mesh: Mesh) -> None:
    """Like torch's in-place operations, it writes to a parameter under no_grad(), and is refused otherwise."""
    out = torch.nn.Parameter(torch.zeros(2, 8))
    with torch.no_grad():
        quantized_all_gather(values(mesh.rank, 8), "int8:8", mesh, out=out)
    assert torch.equal(out, quantized_all_gather(values(mesh.rank, 8), "int8:8", mesh))
    with pytest.raises(ValueError, match=r"out requires gradients, .*: pass out.detach\(\)"):
        quantized_all_gather(ZEROS, "int8:8", mesh, out=out)


ZEROS = torch.zeros(8)


class Mine(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize(
    ("collective", "arguments", "options", "error", "message"),
    [
        (quantized_reduce_scatter, (ZEROS[:7], "bf16"), {}, ValueError, r"x of shape \(7,\) cannot be cut for 2 ranks"),
        (quantized_all_gather, (ZEROS.long(), "bf16"), {}, ValueError, "fp32, bf16, fp16, got torch.int64"),
        (quantized_all_gather, (ZEROS, "int9:8"), {}, CodecError, "2 to 8 bits"),
        (quantized_all_gather, (ZEROS, "bf16"), {"out": torch.zeros(8, 2).t()}, ValueError,
         r"out must be a contiguous tensor of shape \(2, 8\) and torch.float32, got \(2, 8\)"),
        (quantized_all_gather, (ZEROS, "int8:8:stochastic"), {}, ValueError,
         "int8:8:stochastic rounds stochastically and needs random bits: pass key="),
        (quantized_reduce_scatter, (ZEROS, "bf16"), {"reduce": "twohop"}, PolicyError, "reduce = 'twohop'"),
        (quantized_all_gather, (ZEROS, "bf16"), {"gather": "falt"}, PolicyError, "gather = 'falt'"),
        (quantized_reduce_scatter, (ZEROS, ["bf16", "bf16", "fp32"]), {}, ValueError,
         "codecs has 3 entries: pass one codec, or one for each of the two hops"),
        (quantized_all_gather, (ZEROS, object()), {}, CodecError, "is a object: expected fp32"),
        (quantized_reduce_scatter, (ZEROS, object()), {}, CodecError, "is a object: expected fp32"),
        (quantized_reduce_scatter, (ZEROS, ("bf16", "fp32")), {"reduce": "ring"}, PolicyError, "has one hop"),
        *(
            (collective, (x, "int8:8"), {}, ValueError, message)
            for collective in (quantized_all_gather, quantized_reduce_scatter)
            for x, message in (
                (ZEROS.double(), "fp32, bf16, fp16, got torch.float64"),
                (ZEROS.bool(), "fp32, bf16, fp16, got torch.bool"),
                (ZEROS.to(torch.complex64).conj(), "fp32, bf16, fp16, got torch.complex64"),
                (ZEROS.view(2, 4).to_sparse(), "x is a sparse_coo tensor, not a dense one: convert it first"),
                (ZEROS.to("meta"), "x is on meta, but the mesh is on cpu: move x there"),
                (ZEROS.as_subclass(Mine), "x is a Mine: pass a plain torch.Tensor"),
                ([0.0] * 8, "x is a list: pass a plain torch.Tensor"),
            )
        ),
        (quantized_reduce_scatter, (torch.tensor(1.0), "bf16"), {}, ValueError, r"x of shape \(\) cannot be cut"),
        *(
            (quantized_all_gather, (ZEROS, "bf16"), {"out": out}, ValueError, message)
            for out, message in (
                (torch.zeros(2, 16)[:, ::2], r"got \(2, 8\) torch.float32 with strides \(16, 2\)"),
                (torch.zeros(8).expand(2, 8), r"got \(2, 8\) torch.float32 with strides \(0, 1\)"),
                (torch._neg_view(torch.zeros(2, 8)), r"contiguous .*, and torch negates it lazily \(is_neg"),
                (torch.zeros(2, 8).bfloat16(), r"contiguous .*, got \(2, 8\) torch.bfloat16"),
                (torch.zeros(2, 8, device="meta"), "out is on meta, but the mesh is on cpu"),
                (torch.zeros(2, 8).to_sparse(), "out is a sparse_coo tensor"),
                (torch.zeros(2, 8).as_subclass(Mine), "out is a Mine: pass a plain torch.Tensor"),
            )
        ),
    ],
)  # fmt: skip
@each_rank(1, 2)
def test_misuse_is_one_clear_line(
    mesh: Mesh, *, collective: Any, arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    """Every misuse raises an error that names the numbers, before anything is sent."""
    with pytest.raises(error, match=message):
        collective(*arguments, mesh, **options)
