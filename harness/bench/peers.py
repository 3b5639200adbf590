"""CPU quantisers of other libraries, timed beside our codecs.

Their arithmetic equals no codec of ours, so only their speed is compared, and the table marks them.  Neither
writes into an existing buffer on a CPU, so their seconds include allocation.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

NAMES: Final = ("bitsandbytes", "torchao")


@dataclass(frozen=True, slots=True)
class Coding:
    """A peer library's quantiser of one tensor.

    Attributes:
        backend: of :data:`NAMES`.
        codec: its name.
        arithmetic: description of what it computes.
        nbytes: bytes of codes and scales.
        encode: one call.
        decode: one call.
    """

    backend: str
    codec: str
    arithmetic: str
    nbytes: int
    encode: Callable[[], object]
    decode: Callable[[], object]


def why_missing(name: str) -> str | None:
    """How to install a peer that is missing; None if it is installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"{name} is not installed: pip install -c constraints.txt -e '.[peers]'"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the peers among ``names``, for the record."""
    return {name: importlib.metadata.version(name) for name in names if name in NAMES}


def codings(name: str, x: Tensor) -> list[Coding]:
    """The quantisers of peer ``name`` for elements ``x`` (S,)."""
    # An OpenMP of its own reads this when it is loaded; the process is an entry point.
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return {"bitsandbytes": _bitsandbytes, "torchao": _torchao}[name](x)


def _bitsandbytes(x: Tensor) -> list[Coding]:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    found = []
    for block in (256, 4096):
        codes, state = functional.quantize_blockwise(x, blocksize=block)
        found.append(
            Coding(
                "bitsandbytes",
                f"dynamic8:{block}",
                "8-bit codebook of unevenly spaced values, nearest by search; absmax scale per block",
                codes.nbytes + state.absmax.nbytes,
                lambda block=block: functional.quantize_blockwise(x, blocksize=block),  # type: ignore[misc]
                lambda codes=codes, state=state: functional.dequantize_blockwise(codes, state),  # type: ignore[misc]
            )
        )
    codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    found.append(
        Coding(
            "bitsandbytes",
            "nf4:64",
            "4-bit codebook of normal quantiles; absmax scale per block",
            codes.nbytes + state.absmax.nbytes,
            lambda: functional.quantize_4bit(x, blocksize=64, quant_type="nf4"),
            lambda: functional.dequantize_4bit(codes, state),
        )
    )
    return found


def _torchao(x: Tensor) -> list[Coding]:
    affine: Any = importlib.import_module("torchao.quantization.quant_primitives")
    mx: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    block = (256,)

    def encode_affine() -> tuple[Tensor, Tensor, Tensor]:
        scale, zero = affine.choose_qparams_affine(
            x, affine.MappingType.SYMMETRIC, block, torch.int8, scale_dtype=torch.float32
        )
        return affine.quantize_affine(x, block, scale, zero, torch.int8), scale, zero

    codes, scale, zero = encode_affine()
    mx_scale, mx_codes = mx.to_mx(x, torch.float8_e4m3fn, 32)
    return [
        Coding(
            "torchao",
            "affine int8:256",
            "symmetric integers, scale absmax / 127.5 and a zero point; PyTorch operations, not compiled",
            codes.nbytes + scale.nbytes + zero.nbytes,
            encode_affine,
            lambda: affine.dequantize_affine(codes, block, scale, zero, torch.int8, output_dtype=x.dtype),
        ),
        Coding(
            "torchao",
            "mx e4m3",
            "MXFP8 with a scale rounded down; PyTorch operations, not compiled",
            mx_codes.nbytes + mx_scale.nbytes,
            lambda: mx.to_mx(x, torch.float8_e4m3fn, 32),
            lambda: mx.to_dtype(mx_codes, mx_scale, torch.float8_e4m3fn, 32, x.dtype),
        ),
    ]
