"""Other libraries, timed beside ours: optional extras, imported only when used.

The CPU quantisers of bitsandbytes and torchao have arithmetic that equals no codec of ours, so only their
speed is compared, and the table marks them.  Neither writes into an existing buffer on a CPU, so their
seconds include allocation.
DeepSpeed's ZeRO-3 on a CPU is unquantised, since its quantising kernels do not exist for CPUs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

QUANTISERS: Final = ("bitsandbytes", "torchao")
_EXTRAS: Final = {"bitsandbytes": "peers", "torchao": "peers", "deepspeed": "deepspeed"}
Coding = tuple[str, str, int, Callable[[], object], Callable[[], object]]
"""A quantiser of one tensor: its name, what it computes, bytes of codes and scales, and its two calls."""


def why_missing(name: str) -> str | None:
    """How to install a peer that is missing; None if it is installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"{name} is not installed: pip install -c constraints.txt -e '.[{_EXTRAS[name]}]'"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the peers among ``names``, for the record."""
    return {name: importlib.metadata.version(name) for name in names if name in _EXTRAS}


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


def deepspeed(
    model: nn.Module, build_optimizer: Callable[[Any], torch.optim.Optimizer], *, sequences: int, kept: bool
) -> tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]:
    """Shard ``model`` in place over all ranks of the default group, which must all call it.

    ``sequences`` are of one rank in one step; ``kept`` weights stay gathered until backward, as by default,
    else they are released after use.

    Returns:
        A training step, which returns the () loss before it, and DeepSpeed's configuration: ZeRO-3 in fp32,
        everything sharded, no clipping, which by default is at 1.0.
    """
    config = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 1_000_000_000 if kept else 0,  # elements; the default
        },
    }
    # It asks the environment alone for the device, and for the rank of this process on its node.
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    library: Any = importlib.import_module("deepspeed")
    # Its all-reduce for inference is compiled by every first start and never called in training; a
    # compilation that was killed leaves a lock behind that later ones wait for without end.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    library.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    optimizer = build_optimizer(model.parameters())
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, config
