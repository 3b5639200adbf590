"""The fake libraries and the emulation: what they compute, and which mistakes they name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from impl.codecs.codec import parse
from tests.cuda_on_cpu import host
from tests.fake_gpu import build
from tests.gpu_first import are_reference

pytestmark = pytest.mark.needs("fake GPU")
CUDA = "cuda"


def test_operations_have_the_values_of_a_cpu() -> None:
    """A product, a scatter, a data-dependent shape, a foreach and a fused optimizer equal those of the CPU."""

    def results(device: str) -> list[torch.Tensor]:
        x = (torch.arange(24.0) - 11).view(4, 6).to(device).requires_grad_()
        loss = (x @ x.T).to(torch.bfloat16).float().tanh().sum()
        loss.backward()
        assert x.grad is not None
        index = torch.tensor([0, 2, 2], device=device)
        scattered = torch.zeros(4, 6, device=device).index_add_(0, index, x.detach()[:3])
        optimizer = torch.optim.AdamW([x], lr=0.1, fused=True)
        optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_([x], 1.0)
        return [x.grad, scattered, x.detach()[x.detach() > 0], x.detach(), norm]

    for fake, true in zip(results(CUDA), results("cpu"), strict=True):
        torch.testing.assert_close(fake.cpu(), true, rtol=0, atol=0)


def test_random_numbers_follow_the_generator_of_the_device() -> None:
    """The same state of the device's generator gives the same numbers, and the CPU's generator does not move."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = (torch.randn(8, device=CUDA).cpu() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.randn(8, device=CUDA).cpu(), first)
    assert not torch.equal(first, second)


def test_memory_is_limited() -> None:
    """An allocation beyond the device's 80 GiB is refused as on a GPU, and memory that was freed is free again."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert total == 80 << 30
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device=CUDA)
    block = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.mem_get_info()[0] <= free - (1 << 30)
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free


def test_a_function_that_is_not_written_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """A call of a library that has only stubs is an error, and the stub names itself."""
    with pytest.raises(RuntimeError):
        torch.fft.fft(torch.ones(8, device=CUDA))
    assert "fake GPU: cufft" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("true", "false"),
    [
        (
            "stored.scale = float_of(extent.high) / scheme.steps();",
            "stored.scale = float_of(extent.high) / 126.0f;",
        ),
        (None, None),
    ],
    ids=["wrong-scale", "as-it-is"],
)
def test_a_kernel_with_a_wrong_scale_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, true: str | None, false: str | None
) -> None:
    """With another divisor for the scale, a kernel's codes differ from the reference, as ``gpu_first`` asks."""
    from tests.fake_gpu import emulate

    if true is not None and false is not None:
        sources = tmp_path / "cuda"
        shutil.copytree(host.SOURCES, sources)
        text = (sources / "codec.cuh").read_text()
        assert text.count(true) == 1
        (sources / "codec.cuh").write_text(text.replace(true, false))
        monkeypatch.setattr(host, "SOURCES", sources)
    monkeypatch.setattr(emulate, "_host", lambda: launches)
    launches = host.Host(emulate.kernel_folder())
    answer = are_reference(parse("int8:256"), "bf16", torch.device(CUDA, torch.cuda.current_device()))
    assert launches.ran
    assert answer["equal"] is (true is None)


# A rank of two, which makes the calls that its arguments name, and prints what it has after each.
_RANK = """
import os, sys, torch, torch.distributed as dist
rank, store, calls = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2, store=dist.FileStore(store, 2))
for call in calls:
    one, two = torch.full((4,), 1.0 + rank, device="cuda"), torch.arange(8.0, device="cuda") + 10 * rank
    out = torch.zeros(8, device="cuda")
    if call == "gather":
        dist.all_gather_into_tensor(out, one)
    elif call == "turn":
        dist.all_to_all_single(out, two)
    elif call == "sum":
        dist.all_reduce(two)
        out = two
    elif call == "mean":
        dist.reduce_scatter_tensor(out[:4], two, dist.ReduceOp.AVG)
    elif call == "pair":
        both = [dist.P2POp(dist.isend, two, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    event = torch.cuda.Event()
    event.record()
    print(call, out.cpu().int().tolist() if event.query() else "under way", flush=True)
os._exit(0)
"""


def _ranks(folder: Path, calls: Sequence[Sequence[str]], **variables: str) -> list[tuple[str, str]]:
    """Returns what each rank prints, and its errors; ``calls`` has the calls of each rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(folder / "store"), *calls[rank]],
            env=build.environment(2, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [process.communicate(timeout=120) for process in processes]


def test_collectives_have_true_results(tmp_path: Path) -> None:
    """Two ranks gather, exchange columns, sum, average parts, and send to each other."""
    (first, _), (second, _) = _ranks(tmp_path, [["gather", "turn", "sum", "mean", "pair"]] * 2)
    assert first.splitlines() == [
        "gather [1, 1, 1, 1, 2, 2, 2, 2]",
        "turn [0, 1, 2, 3, 10, 11, 12, 13]",
        "sum [10, 12, 14, 16, 18, 20, 22, 24]",
        "mean [5, 6, 7, 8, 0, 0, 0, 0]",
        "pair [10, 11, 12, 13, 14, 15, 16, 17]",
    ]
    assert second.splitlines() == [
        "gather [1, 1, 1, 1, 2, 2, 2, 2]",
        "turn [4, 5, 6, 7, 14, 15, 16, 17]",
        "sum [10, 12, 14, 16, 18, 20, 22, 24]",
        "mean [9, 10, 11, 12, 0, 0, 0, 0]",
        "pair [0, 1, 2, 3, 4, 5, 6, 7]",
    ]


def test_a_call_out_of_order_on_one_rank_is_named(tmp_path: Path) -> None:
    """A rank that makes two calls in the other order fails, and the error names the calls of both ranks."""
    ends = _ranks(tmp_path, [["gather", "turn"], ["turn", "gather"]])
    for rank, (mine, other) in enumerate((("AllGather", "AlltoAll"), ("AlltoAll", "AllGather"))):
        output, errors = ends[rank]
        assert not output
        assert (
            f"rank {rank} of 2 is in {mine} of 16 bytes, type 7, call 1; rank {1 - rank} is in {other}"
            in errors
        )


def test_a_call_that_one_rank_does_not_join_never_ends(tmp_path: Path) -> None:
    """The rank's work is never done, and its host goes on, as with NCCL."""
    (waits, errors), _ = _ranks(tmp_path, [["sum"], []], FAKE_NCCL_PATIENCE="1")
    assert waits == "sum under way\n", errors


def test_a_silent_nccl_answers_no_call(tmp_path: Path) -> None:
    """After the number of calls that FAKE_NCCL_SILENT names, no call of a rank ends."""
    for output, errors in _ranks(tmp_path, [["sum"] * 3] * 2, FAKE_NCCL_SILENT="2"):
        assert output.splitlines()[2] == "sum under way", errors
        assert "under way" not in output.splitlines()[1]
