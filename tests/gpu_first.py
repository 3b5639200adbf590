"""``python -m tests.gpu_first``: the first measurements of a GPU, in one process, each written at once.

For a device that is lent for minutes.  Every answer is a line of JSON, printed and appended to ``--out``,
so a killed run leaves its answers.  In order: the device, every kernel beside the reference, GB/s beside
a copy, what a launch costs the host, and a step of 1 B parameters beside the plain module and FSDP2.  A
failure is a line, and the next question follows.  ``--device cpu`` rehearses it in tiny sizes, and so does
``--tiny`` on a GPU.  It needs only torch, NumPy and CuPy.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.benchmark import Timer

from harness.laws.laws import Case, Duty, Violation, attempt
from harness.laws.subject import subject_of
from impl import ops
from impl.codecs.codec import FORMATS, Codec, Dtype, OwnCodec, Raw, parse
from impl.codecs.reference import DTYPES, Carried
from impl.codecs.rounding_noise import Noise
from impl.comm.mesh import Mesh
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard

CODECS: Final = (
    *("int8:2048", "int8:256", "int4:256", "int4:256:clip", "int4:256:asym", "int8:256:stochastic"),
    *("int4:256:stochastic", "int4:128:hadamard32", "int6:256", "int3:64", "int8:shard", "fp8e4m3:128"),
    *("mxfp8", "mxfp4", *FORMATS),
)
HOPS: Final = (
    *(("int4:256", "int4:256"), ("int4:256", "int4:256:stochastic"), ("int8:256", "int4:256")),
    *(("int8:2048", "int8:2048"), ("mxfp8", "mxfp4"), ("int4:128:hadamard32", "int8:256")),
)
SOURCES: Final = 8
ENGINES: Final = ("plain", "fsdp2", "zero3", "zeropp")
Fields = dict[str, Any]


def noise_of(codec: Codec) -> Noise | None:
    """Random bits of one row, where the codec takes some."""
    return Noise((1, 2, 3, 4)) if codec.stochastic else None


def seconds_of(operation: Callable[[], object], seconds: float) -> float:
    """Median of an operation, called for so long; on a GPU launches queue ahead."""
    return Timer("call()", globals={"call": operation}).blocked_autorange(min_run_time=seconds).median


def of_device(device: torch.device) -> Fields:
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        import cupy

        versions |= {
            "name": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
            "driver": cupy.cuda.runtime.driverGetVersion(), "cupy": cupy.__version__,
            "nvrtc": cupy.cuda.nvrtc.getVersion(), "bytes": torch.cuda.mem_get_info()[1],
        }  # fmt: skip
    return {**versions, "backend": ops.backend_of(device)}


def are_reference(codec: Codec, kind: Dtype, device: torch.device) -> Fields:
    """Whether the device's kernels equal the reference, on a row with a short end and an aligned one."""
    subject, draw = subject_of(codec, ops.backend_of(device)), torch.Generator().manual_seed(7)
    try:
        for numel in (9001, 9216):
            x = torch.randn(codec.grain * -(-numel // codec.grain), generator=draw)
            x[: numel // 9] = 0
            x *= 10.0 ** (torch.arange(len(x)) // (numel // SOURCES) % SOURCES - 5.0)  # small and large ones
            for duty in (Duty.BITS, Duty.SUM):
                attempt(subject, duty, Case(x.to(DTYPES[kind]), kind, noise=Noise((1, 2, 3, 4))))
    except Violation as problem:
        return {"equal": False, "off": str(problem)}
    return {"equal": True}


def rates(text: str, kind: Dtype, mebibytes: int, device: torch.device, seconds: float) -> Fields:
    """GB/s of a codec's operations, counting every byte read and written once, and their share of a copy's
    of the elements; sums have eight sources, each of an eighth of the elements.
    """
    codec, numel = parse(text), (mebibytes << 20) // DTYPES[kind].itemsize
    part, noise = numel // SOURCES, noise_of(codec)
    x, out = torch.randn(numel, device=device).to(DTYPES[kind]), torch.empty(part, device=device)
    back, frame = torch.empty_like(x), torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8, device=device)
    frames = torch.zeros(SOURCES, codec.frame_bytes(part), dtype=torch.uint8, device=device)
    for row in frames:
        ops.encode(codec, x[:part], row, noise=noise)
    timed: dict[str, tuple[int, Callable[[], object]]] = {
        "encode": (x.nbytes + frame.nbytes, partial(ops.encode, codec, x, frame, noise=noise)),
        "decode": (x.nbytes + frame.nbytes, partial(ops.decode, codec, frame, back)),
        "decode_sum": (frames.nbytes + out.nbytes, partial(ops.decode_sum, codec, frames, out)),
    }
    if not isinstance(codec, Raw | OwnCodec):
        carried = Carried(torch.zeros(numel, device=device), 0.8)
        encode = partial(ops.encode, codec, x, frame, noise=noise, carried=carried)
        timed["encode_carried"] = x.nbytes + frame.nbytes + 8 * numel, encode
    for onward in (parse(second) for first, second in HOPS if first == text):
        target = torch.zeros(onward.frame_bytes(part), dtype=torch.uint8, device=device)
        fused = partial(ops.decode_sum_encode, codec, onward, frames, target, part, noise=noise_of(onward))
        timed[f"to_{onward}"] = frames.nbytes + target.nbytes, fused
    copy = 2 * x.nbytes / seconds_of(partial(back.copy_, x), seconds)
    measured: Fields = {"copy_gb": round(copy / 1e9, 1)}
    for name, (moved, operation) in timed.items():
        rate = moved / seconds_of(operation, seconds)
        measured |= {f"{name}_gb": round(rate / 1e9, 1), f"{name}_of_copy": round(rate / copy, 3)}
    return measured


def launch(text: str, device: torch.device) -> Fields:
    """Microseconds of the host for a small encoding that is repeated."""
    codec, x = parse(text), torch.randn(4096, device=device).bfloat16()
    frame = torch.zeros(codec.frame_bytes(4096), dtype=torch.uint8, device=device)
    return {"host_us": round(1e6 * seconds_of(partial(ops.encode, codec, x, frame), 0.01), 1)}


def transformer(width: int, layers: int) -> nn.Sequential:
    """(B, T, 256) logits of (B, T) tokens, by ``layers`` blocks."""
    options: Fields = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(width, width // 64, 4 * width, **options) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.Linear(width, 256, bias=False))


def engine(name: str, tokens: int, device: torch.device, *, large: bool) -> Fields:
    """Milliseconds of forward and backward, and of a whole step, of one rank in bf16; bytes at most."""
    gpu = device.type == "cuda"
    width, layers = (2048, 20) if large else (128, 2)
    gc.collect()  # engines and their hooks are cycles
    torch.manual_seed(0)
    with device:
        model = transformer(width, layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if name == "plain":
        model = model.bfloat16()
    elif name == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: Fields = {
            "mesh": init_device_mesh(device.type, (1,)), "mp_policy": MixedPrecisionPolicy(torch.bfloat16)
        }  # fmt: skip
        for block in model:
            fully_shard(block, **options)
        fully_shard(model, **options)
    masters: Any = model.parameters()
    if name in ("zero3", "zeropp"):
        policy = preset(name, compute="bf16")
        masters = shard(model, mesh=Mesh.create(Topology(1, 1), device), policy=policy).param_groups()
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=gpu)
    batch = torch.randint(256, (max(1, tokens // 1024), min(tokens, 1024)), device=device)
    losses: list[torch.Tensor] = []  # read last: nothing here waits for the device

    def passes(*, stepping: bool) -> None:
        loss = nn.functional.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())
        loss.backward()
        losses.append(loss.detach())
        if stepping:
            optimizer.step()
        optimizer.zero_grad()

    if gpu:
        torch.cuda.reset_peak_memory_stats()
    least = 2.0 if large else 0.01
    whole, passing = (seconds_of(partial(passes, stepping=stepping), least) for stepping in (True, False))
    return {
        "parameters": parameters, "passes_ms": round(1e3 * passing, 2), "step_ms": round(1e3 * whole, 2),
        "losses": [float(loss) for loss in losses[:2]],
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else 0,
    }  # fmt: skip


def questions(device: torch.device, *, large: bool) -> Iterator[tuple[Fields, Callable[[], Fields]]]:
    """Questions and the functions that answer them, correctness first; ``large`` sizes are for a GPU."""
    yield {"ask": "device"}, partial(of_device, device)
    for text, kind in itertools.product(CODECS, DTYPES):
        question = {"ask": "reference", "codec": text, "type": kind}
        yield question, partial(are_reference, parse(text), kind, device)
    for mebibytes, text in itertools.product((64, 256) if large else (1,), CODECS if large else CODECS[:3]):
        question = {"ask": "rates", "codec": text, "mebibytes": mebibytes}
        yield question, partial(rates, text, "bf16", mebibytes, device, 0.02 if large else 1e-4)
    yield {"ask": "launch", "codec": "int8:2048"}, partial(launch, "int8:2048", device)
    for tokens, name in itertools.product((4096, 16384) if large else (64,), ENGINES):
        answer = partial(engine, name, tokens, device, large=large)
        yield {"ask": "engine", "engine": name, "tokens": tokens}, answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer all questions; 0 if none failed, and every kernel equals the reference."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_first", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-first.jsonl"), help="appended to, line by line")
    parser.add_argument("--minutes", type=float, default=5.0, help="after which nothing more is asked")
    parser.add_argument("--tiny", action="store_true", help="the sizes of a rehearsal, on a GPU too")
    options = parser.parse_args(arguments)
    device, ends, wrong = torch.device(options.device), time.monotonic() + 60 * options.minutes, 0
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    with options.out.open("a", encoding="utf-8") as file:
        for question, answer in questions(device, large=device.type == "cuda" and not options.tiny):
            begun = time.monotonic()
            try:
                fields = answer() if begun < ends else {"failed": f"left out after {options.minutes:g} min"}
            except Exception as error:  # one that fails is a line
                fields = {"failed": f"{type(error).__name__}: {error}"[:400]}
            wrong += "failed" in fields or fields.get("equal") is False
            fields["seconds"] = round(time.monotonic() - begun, 2)
            line = json.dumps({**question, **fields}, default=str)
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
            print(line, flush=True)  # last, so that every printed line is in the file
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
