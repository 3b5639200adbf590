"""The CUDA kernels, on the host and with ``-m gpu`` on a device, equal the reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from impl.codecs import reference
from impl.codecs.codec import Raw, parse
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Key
from impl.cuda.kernels import Kernels
from impl.cuda.launch import Launch
from tests.impl.codecs.properties import (  # noqa: F401  # tests that run here too
    Backend,
    garbage,
    noise_of,
    test_blocks_at_the_limits_of_each_version,
    test_elements_need_not_be_contiguous,
    test_error_feedback_in_each_version,
    test_error_feedback_is_that_of_the_reference,
    test_every_edge_between_two_levels_is_rounded_as_the_reference_does,
    test_hostile_blocks_are_coded_as_the_reference_does,
    test_large_sums_encoded_again,
    test_lengths_at_the_edges_of_octets_and_tiles,
    test_long_rows_of_regular_blocks,
    test_rotations_of_every_size,
    test_strided_batches_are_coded_in_place,
    test_sums_are_those_of_the_reference,
    test_sums_encoded_again_are_those_of_the_reference,
    test_the_full_product,
    use_all,
    without_reference,
)
from tests.support.cubin import VARIANTS


@pytest.mark.parametrize(
    ("text", "numel", "kernels"),
    [
        ("int8:2048", 4096, ["encode_held<Fp32, 8, false>"]),
        ("int4:256:stochastic", 4096, ["encode_held<Fp32, 4, true>"]),
        ("int4:8192", 40_000, ["encode_held<Fp32, 4, false>"]),
        ("int3:shard", 7001, ["encode_general<Scheme<0>, 2>"]),
        ("int4:256:hadamard32", 4096, ["encode_general<Scheme<0>, 1>"]),
        ("mxfp4:stochastic", 4096, ["encode_general<Floats<0>, 1>"]),
        ("int6:100", 4096, ["encode_staged<Scheme<0>>"]),
        ("fp8e4m3:1023", 4096, ["encode_staged<Floats<0>>"]),
        ("int8:1025", 4096, ["encode_extents<Scheme<0>>", "encode_given<Scheme<0>>"]),
        ("fp8e5m2:shard", 8_193, ["encode_extents<Floats<0>>", "encode_given<Floats<0>>"]),
    ],
)
def test_the_version_follows_from_the_block(
    backend: Backend, text: str, numel: int, kernels: list[str]
) -> None:
    """Each block is encoded by the version that the table names."""
    before, codec = len(backend.run.ran), parse(text)
    x = torch.randn(numel, device=backend.device)
    frames = garbage(codec, x.shape, x.device)
    backend.kernels.encode(codec, x, frames, noise=noise_of(codec, x.shape[:-1]))
    assert backend.run.ran[before:] == kernels


DEMANDED = [
    *(
        f"int{bits}:{block}{asym}"
        for bits in range(2, 9)
        for block in (1, 256, "shard")
        for asym in ("", ":asym")
    ),
    *(f"fp8{element}:{block}" for element in ("e4m3", "e5m2") for block in (7, 128, "shard")),
    *("mxfp8", "mxfp8e5m2", "mxfp4"),
]


def test_every_codec_with_scales_has_kernels() -> None:
    """No codec with scales is left to the reference, whatever its rounding and rotation."""
    launches: list[Launch] = []
    kernels, x = Kernels(lambda launch, _: launches.append(launch)), torch.zeros(256)

    def launched(text: str) -> bool:
        launches.clear()
        codec = parse(text)
        frame = torch.zeros(codec.frame_bytes(256), dtype=torch.uint8)
        kernels.encode(codec, x, frame, noise=noise_of(codec, x.shape[:-1]))
        encoding = len(launches)
        kernels.decode(codec, frame, x)
        return 0 < encoding < len(launches)

    for text in DEMANDED:
        assert launched(text)
        assert launched(f"{text}:stochastic")
        codec = parse(text)
        if not isinstance(codec, Raw) and codec.block not in {1, 7}:
            assert launched(f"{text}:hadamard32:stochastic")
    assert not launched("bf16")  # a cast


@pytest.mark.parametrize(
    "text", ["int4:256:stochastic", "fp8e4m3:100", "mxfp4:hadamard32", "int6:shard:asym"]
)
@pytest.mark.parametrize("carries", [False, True])
def test_nothing_is_left_to_the_reference(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, text: str, *, carries: bool
) -> None:
    """Where there are kernels, no operation calls the reference's."""
    without_reference(monkeypatch)
    use_all(backend, parse(text), carries=carries)


def nothing(launch: Launch, device: torch.device) -> None:
    """Where no launch is expected."""
    raise AssertionError(launch)


def test_what_a_kernel_cannot_do_is_refused() -> None:
    """Impossible types, strides and shapes raise one line, with the numbers."""
    kernels, codec = Kernels(nothing), parse("int8:8")
    frames = torch.zeros(16, 48, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"int8:8: \(9,\) elements need frames of 32 uint8, got \(33,\)"):
        kernels.encode(codec, torch.zeros(9), torch.zeros(33, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"elements are fp32, bf16 or fp16, got torch.float64"):
        kernels.encode(codec, torch.zeros(16, 32, dtype=torch.float64), frames)
    with pytest.raises(ValueError, match=r"contiguous, got strides \(1, 48\)"):
        kernels.decode(codec, torch.zeros(48, 48, dtype=torch.uint8).t(), torch.zeros(48, 32))
    with pytest.raises(ValueError, match=r"a sum is fp32, got torch.bfloat16"):
        kernels.decode_sum(codec, frames.view(4, 4, 48), torch.zeros(4, 32, dtype=torch.bfloat16))
    many = torch.zeros(2, 2, 2, 2, 2, 2, 2, 2, 32).permute(1, 0, 3, 2, 5, 4, 7, 6, 8)
    with pytest.raises(ValueError, match="the CUDA kernels take 3"):
        kernels.encode(codec, many, torch.zeros(*many.shape[:-1], 48, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 x 65536 rows: a grid holds 65535"):
        kernels.encode(
            codec,
            torch.zeros(1).expand(65_536, 32),
            torch.zeros(1, dtype=torch.uint8).expand(65_536, 48).clone(),
        )
    rows = torch.zeros(1).expand(2**31)
    with pytest.raises(ValueError, match="2147483648 elements a row: the CUDA kernels take 2147483647"):
        kernels.encode(codec, rows, torch.empty(codec.frame_bytes(2**31), dtype=torch.uint8))
    with pytest.raises(ValueError, match="int8:8:stochastic rounds stochastically: it needs noise"):
        kernels.encode(parse("int8:8:stochastic"), torch.zeros(16, 32), frames)
    with pytest.raises(ValueError, match=r"and noise with \(8, 24, 8, 72\): the CUDA kernels take 3"):
        kernels.encode(
            parse("int8:8:stochastic"),
            torch.zeros(2, 2, 2, 2, 32),
            torch.zeros(2, 2, 2, 2, 48, dtype=torch.uint8),
            noise=Key(0, 0, 0, "", "weights").noise(0, (8, 24, 8, 72)),
        )
    with pytest.raises(ValueError, match=r"carry as many errors in fp32, bf16 or fp16, got \(32,\)"):
        kernels.encode(codec, torch.zeros(16, 32), frames, carried=Carried(torch.zeros(32)))
    with pytest.raises(ValueError, match=r"on \['cpu', 'meta'\]"):
        kernels.encode(codec, torch.zeros(16, 32, device="meta"), frames)


def test_a_launch_is_repeated_for_tensors_that_differ_in_their_addresses(backend: Backend) -> None:
    """The same launch again, but for addresses; another alignment, stride or type is laid out anew.

    Results are the reference's each time.
    """
    launches: list[Launch] = []

    def run(launch: Launch, device: torch.device) -> None:
        launches.append(launch)
        backend.run(launch, device)

    kernels, codec = Kernels(run), parse("int8:32")
    store = torch.randn(3 * 256 + 4, device=backend.device)
    nbytes = codec.frame_bytes(256)
    for start, dtype in ((0, torch.float32), (256, torch.float32), (3, torch.float32), (0, torch.bfloat16)):
        x = store[start : start + 256].to(dtype)
        frames, wanted = (torch.zeros(nbytes, dtype=torch.uint8, device=backend.device) for _ in range(2))
        kernels.encode(codec, x, frames)
        reference.encode(codec, x, wanted)
        assert torch.equal(frames, wanted)
        out, decoded = torch.empty_like(x), torch.empty_like(x)
        kernels.decode(codec, frames, out)
        reference.decode(codec, frames, decoded)
        assert torch.equal(out, decoded)
        assert launches[-2].arguments["values"]["address"][0] == x.data_ptr()
        assert launches[-1].arguments["values"]["address"][0] == out.data_ptr()
        assert launches[-1].arguments["frames"]["address"][0] == frames.data_ptr()
    first, second, unaligned, _ = launches[::2]
    assert first.arguments["values"]["vectors"][0] == second.arguments["values"]["vectors"][0] == 1
    assert unaligned.arguments["values"]["vectors"][0] == 0


def test_nothing_is_launched_for_nothing() -> None:
    """Empty rows and empty batches launch no kernel."""
    kernels, codec = Kernels(nothing), parse("int4:8")
    kernels.encode(codec, torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.uint8))
    kernels.decode(codec, torch.zeros(0, 32, dtype=torch.uint8), torch.zeros(0, 8))
    kernels.decode_sum(codec, torch.zeros(2, 0, 32, dtype=torch.uint8), torch.zeros(0, 8))


def test_only_listed_kernels_are_asked_for(backend: Backend) -> None:
    """What ran in this session stands in the list that the compile gate compiles."""
    assert set(backend.run.ran) <= {kernel for kernels in VARIANTS.values() for kernel in kernels}
