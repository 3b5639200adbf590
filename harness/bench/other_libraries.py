"""Wraps quantisers of other libraries, which ``zeropp bench codecs`` times for comparison with our codecs.

The libraries are optional, and imported only when they are used.  None of their quantisers gives exactly the same codes
as one of our codecs.  The quantisers cannot write into an existing buffer, so their times include the allocation of
results.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

QUANTISERS: Final = ("bitsandbytes", "torchao", "torch.compile", "deepspeed")
Coding = tuple[str, str, int, Callable[[], object], Callable[[], object]]
"""A quantiser for one tensor: its name, what it computes, the bytes of its codes and scales, and functions that
quantise and dequantise the tensor."""


def why_missing(name: str) -> str | None:
    """Return why a library cannot be used here and, if it is not installed, how to install it.

    Returns None if the library can be used.
    """
    if name == "deepspeed" and not torch.cuda.is_available():
        return "deepspeed: its quantisers need a CUDA device"
    if name == "torch.compile" and not any(map(shutil.which, ("g++", "clang++"))):
        return "torch.compile needs a C++ compiler, and there is neither g++ nor clang++"
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return f"{name} is not installed: pip install {name}"
    return None


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the version of each library in ``names``, by the name of its package.

    Backends of this project, which ``names`` may also have, are left out.
    """
    packages = (name.partition(".")[0] for name in names if name in QUANTISERS)
    return {name: importlib.metadata.version(name) for name in packages}


def codings(name: str, x: Tensor) -> Iterator[Coding]:
    """Yield the quantisers of library ``name`` for the elements ``x`` (S,).

    If the library cannot quantise elements of this type, or elements on this device, nothing is yielded.
    """
    # A library with its own copy of OpenMP reads this variable when it is loaded.  Changing the environment harms
    # nobody, since this process runs only the benchmark.
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return dict(zip(QUANTISERS, (_bitsandbytes, _torchao, _compiled, _deepspeed), strict=True))[name](x)


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


def _compiled(x: Tensor) -> Iterator[Coding]:
    def quantise(x: Tensor, block: int, last: int) -> tuple[Tensor, Tensor]:
        rows = x.view(-1, block).float()
        scale = (rows.abs().amax(dim=1, keepdim=True) / last).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (rows / scale).round().to(torch.int8)
        return (codes[:, ::2] & 15 | codes[:, 1::2] << 4 if last == 7 else codes), scale

    def dequantise(codes: Tensor, scale: Tensor, last: int) -> Tensor:
        if last == 7:
            codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1).flatten(1)
        return (codes.float() * scale).to(x.dtype).view(-1)

    for codec, block, last in (("int8:2048", 2048, 127), ("int8:256", 256, 127), ("int4:256", 256, 7)):
        encode = partial(torch.compile(quantise, dynamic=False), x, block, last)
        codes, scale = encode()
        decode = partial(torch.compile(dequantise, dynamic=False), codes, scale, last)
        arithmetic = f"symmetric integers, scale absmax / {last}; PyTorch operations, compiled"
        yield codec, arithmetic, codes.nbytes + scale.nbytes, encode, decode


def _deepspeed(x: Tensor) -> Iterator[Coding]:
    if x.dtype != torch.float16 or x.device.type != "cuda":
        return
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    kernels = builders.QuantizerBuilder().load()
    for bits, group in ((8, 2048), (4, 256)):
        arguments = (x.numel() // group, bits, kernels.Symmetric)
        encode = partial(kernels.quantize, x, *arguments)
        codes, scale = encode()
        decode = partial(kernels.dequantize, codes, scale, *arguments)
        arithmetic = f"symmetric integers, groups of {group}, the positive extreme clipped"
        yield f"int{bits}:{group}", arithmetic, codes.nbytes + scale.nbytes, encode, decode
