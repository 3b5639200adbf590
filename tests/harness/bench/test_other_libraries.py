"""Quantisers of other libraries compute what they describe; those that are missing give the reason."""

from __future__ import annotations

import pytest
import torch

from harness.bench import other_libraries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lines_of_pytorch_quantise(dtype: torch.dtype) -> None:
    """The function timed under ``torch.compile`` errs by at most half a step of its block, and its bytes are
    counted right.
    """
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)).to(dtype)
    sizes = {}
    with torch.compiler.set_stance("force_eager"):
        for name, arithmetic, nbytes, encode, decode in other_libraries.codings("torch.compile", x):
            block = int(name.partition(":")[2])
            codes, scale = encode()  # type: ignore[misc]
            assert arithmetic.endswith("compiled")
            assert nbytes == codes.nbytes + scale.nbytes
            decoded = decode()
            assert isinstance(decoded, torch.Tensor)
            assert decoded.dtype == dtype
            off = (decoded.float() - x.float()).view(-1, block).abs()
            assert bool((off <= 0.51 * scale + x.float().view(-1, block).abs() * 2.0**-8).all())
            sizes[name] = codes.nbytes
    assert sizes == {"int8:2048": 1 << 14, "int8:256": 1 << 14, "int4:256": 1 << 13}


@pytest.mark.needs("no CUDA device")
def test_what_needs_a_gpu_says_so() -> None:
    """DeepSpeed's quantisers need fp16 on a GPU; elsewhere they are reported as missing, and none is timed."""
    assert other_libraries.why_missing("deepspeed") == "deepspeed: its quantisers need a CUDA device"
    assert not list(other_libraries.codings("deepspeed", torch.zeros(8, dtype=torch.float16)))
