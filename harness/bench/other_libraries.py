"""Other libraries' quantisers, timed beside ours: optional extras, imported only when used.

The CPU quantisers of bitsandbytes and torchao have arithmetic that equals no codec of ours, so only their
speed is compared, and the table marks them.  Neither writes into an existing buffer on a CPU, so their
seconds include allocation.  Engines are peers in ``harness.suites.peers``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

QUANTISERS: Final = ("bitsandbytes", "torchao")
Coding = tuple[str, str, int, Callable[[], object], Callable[[], object]]
"""A quantiser of one tensor: its name, what it computes, bytes of codes and scales, and its two calls."""


def why_missing(name: str) -> str | None:
    """How to install a peer that is missing; None if it is installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"{name} is not installed: pip install -c constraints.txt -e '.[peers]'"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the peers among ``names``, for the record."""
    return {name: importlib.metadata.version(name) for name in names if name in QUANTISERS}


def codings(name: str, x: Tensor) -> Iterator[Coding]:
    """The quantisers of peer ``name`` for elements ``x`` (S,)."""
    # An OpenMP of its own reads this when it is loaded; the process is an entry point.
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return {"bitsandbytes": _bitsandbytes, "torchao": _torchao}[name](x)


def _bitsandbytes(x: Tensor) -> Iterator[Coding]:
    library: Any = importlib.import_module("bitsandbytes.functional")
    unevenly = "8-bit codebook of unevenly spaced values, nearest by search; absmax scale per block"
    normal = "4-bit codebook of normal quantiles; absmax scale per block"
    bytewise, nf4 = library.quantize_blockwise, partial(library.quantize_4bit, quant_type="nf4")
    for codec, arithmetic, block, quantise, dequantise in (
        ("dynamic8:256", unevenly, 256, bytewise, library.dequantize_blockwise),
        ("dynamic8:4096", unevenly, 4096, bytewise, library.dequantize_blockwise),
        ("nf4:64", normal, 64, nf4, library.dequantize_4bit),
    ):
        encode = partial(quantise, x, blocksize=block)
        codes, state = encode()
        nbytes = codes.nbytes + state.absmax.nbytes
        yield codec, arithmetic, nbytes, encode, partial(dequantise, codes, state)


def _torchao(x: Tensor) -> Iterator[Coding]:
    affine: Any = importlib.import_module("torchao.quantization.quant_primitives")
    mx: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    block = (256,)

    def encode_affine() -> tuple[Tensor, Tensor, Tensor]:
        scale, zero = affine.choose_qparams_affine(
            x, affine.MappingType.SYMMETRIC, block, torch.int8, scale_dtype=torch.float32
        )
        return affine.quantize_affine(x, block, scale, zero, torch.int8), scale, zero

    codes, scale, zero = encode_affine()
    yield (
        "affine int8:256",
        "symmetric integers, scale absmax / 127.5 and a zero point; PyTorch operations, not compiled",
        codes.nbytes + scale.nbytes + zero.nbytes,
        encode_affine,
        partial(affine.dequantize_affine, codes, block, scale, zero, torch.int8, output_dtype=x.dtype),
    )
    encode_mx = partial(mx.to_mx, x, torch.float8_e4m3fn, 32)
    mx_scale, mx_codes = encode_mx()
    yield (
        "mx e4m3",
        "MXFP8 with a scale rounded down; PyTorch operations, not compiled",
        mx_codes.nbytes + mx_scale.nbytes,
        encode_mx,
        partial(mx.to_dtype, mx_codes, mx_scale, torch.float8_e4m3fn, 32, x.dtype),
    )
