"""Kernels without an optimisation write the same bits as the complete ones, with other launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.bench.kernel_ablation import ABLATED
from impl.codecs import reference
from impl.codecs.codec import parse
from impl.cuda.launch import Launch
from tests.cuda_on_cpu.host import Host

WHOLE = ["encode_held<Fp32, 8, false>", "decode<Fp32, 8>", "decode_sum<8, 4>"]
FUSED = ["decode_sum_encode<8, 2, 8, false>"]
APART = ["decode_sum<8, 4>", "encode_held<Fp32, 8, false>"]
GENERAL = ["encode_general<Scheme<0>, 1>", "decode_general<Scheme<0>>", "decode_sum_general<Scheme<0>>"]
WANTED = {
    "cuda-general": [*GENERAL, "decode_sum_encode_general<Scheme<0>, Scheme<0>>"],
    "cuda-shared-memory": ["encode_staged<Scheme<0>>", *WHOLE[1:], *FUSED],
    "cuda-two-reads": ["encode_extents<Scheme<0>>", "encode_given<Scheme<0>>", *WHOLE[1:], *FUSED],
    "cuda-unfused": [*WHOLE, *APART],
    "cuda-narrow": [*WHOLE, *FUSED],
    "cuda-few-warps": [*WHOLE, *FUSED],
}


@pytest.mark.parametrize("name", ABLATED)
def test_each_is_the_reference_by_other_launches(name: str, cuda_libraries: Path) -> None:
    """Frames, decoded elements and sums equal the reference's bits, and the expected kernels are launched."""
    host, wide, idle = Host(cuda_libraries), [], []

    def run(launch: Launch, device: torch.device, **options: Any) -> None:
        places = ("values", "frames", "output", "error")
        vectors = sum(int(launch.arguments[place]["vectors"][0]) for place in places)
        wide.append(vectors + int(launch.arguments["exact"][0]))
        idle.append(options.get("idle_bytes", 0))
        host(launch, device)

    codec, numel = parse("int8:256"), 5000
    x = torch.randn(3, numel, generator=torch.Generator().manual_seed(0))
    outputs = []
    for operations in (reference, ABLATED[name](run)):
        frames = torch.zeros(3, codec.frame_bytes(numel), dtype=torch.uint8)
        operations.encode(codec, x, frames)
        out, total, again = torch.empty(3, numel), torch.empty(numel), torch.zeros_like(frames[0])
        operations.decode(codec, frames, out)
        operations.decode_sum(codec, frames, total)
        operations.decode_sum_encode(codec, codec, frames, again, numel)
        outputs.append((frames, out, total, again))
    for wanted, got in zip(*outputs, strict=True):
        assert torch.equal(wanted, got)
    assert host.ran == WANTED[name]
    assert any(wide) is (name != "cuda-narrow")
    assert all(idle) is (name == "cuda-few-warps")
