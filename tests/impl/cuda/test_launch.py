"""Launches make the right calls to CuPy, which are recorded without a GPU."""

from __future__ import annotations

import hashlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from impl.codecs.codec import parse
from impl.cuda import launch
from impl.cuda.kernels import Kernels
from impl.cuda.launch import ARGUMENTS, Launch, on_device

LAUNCHED = [
    *("Stream.from_external", "Device", "Device().__enter__", "Stream.from_external().__enter__"),
    "RawModule().get_function()",  # the kernel itself
    *("Stream.from_external().__exit__", "Device().__exit__"),
]


def test_threads_that_compile_the_same_kernel_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks may be threads of one process: each writes the whole image, however the threads take turns."""
    wrote, write = threading.Barrier(2), Path.write_bytes

    def write_then_wait(path: Path, image: bytes) -> None:
        write(path, image)
        wrote.wait(10)  # both have written before either renames its file

    monkeypatch.setattr(Path, "write_bytes", write_then_wait)
    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(lambda _: launch._written(tmp_path / "kernel.cubin", b"image"), range(2)))
    assert [path.read_bytes() for path in paths] == [b"image", b"image"]
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.cubin"]


@pytest.mark.needs("CUDA compiler")
def test_a_launch_is_on_torchs_stream_of_the_tensors_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Grid, threads and the one argument are those of the launch; a kernel is loaded once for each device."""
    import cupy

    gpu = MagicMock()
    gpu.Device.return_value.compute_capability = "90"
    for owner, name in ((cupy.cuda, "Device"), (cupy.cuda, "Stream"), (cupy, "RawModule")):
        monkeypatch.setattr(owner, name, getattr(gpu, name))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(launch, "_LOADED", {})
    launch._kernel.cache_clear()
    launches: list[Launch] = []
    codec, x = parse("int8:256"), torch.zeros(5000)
    frame = torch.zeros(codec.frame_bytes(5000), dtype=torch.uint8)
    Kernels(lambda encoding, _: launches.append(encoding)).encode(codec, x, frame)
    (encoding,), kernel, loaded = launches, gpu.RawModule.return_value.get_function.return_value, []
    for index, idle in ((1, 0), (0, 0), (1, 100 << 10)):
        gpu.reset_mock()
        on_device(encoding, torch.device("cuda", index), idle_bytes=idle)
        loaded += gpu.RawModule.call_args_list
        assert gpu.Device.call_args_list[0] == call(index)
        gpu.Stream.from_external.assert_called_once_with(f"stream of cuda:{index}")
        grid, block, (argument,) = kernel.call_args.args
        assert (grid, block) == (encoding.grid, (encoding.threads, 1, 1))
        assert kernel.call_args.kwargs == {"shared_mem": idle}
        assert argument.dtype.fields is None  # describing fields costs time
        assert argument.tobytes() == encoding.arguments.tobytes()
        assert (argument.itemsize, argument.size) == (ARGUMENTS.itemsize, 1)  # passed by value
    assert [name for name, *_ in gpu.mock_calls] == LAUNCHED
    assert kernel.max_dynamic_shared_size_bytes == 100 << 10
    assert len(loaded) == 2
    assert loaded[0] == loaded[1]  # one architecture
    path = Path(loaded[0].kwargs["path"])
    name, image = path.suffixes[0][1:], path.read_bytes()
    assert image.startswith(b"\x7fELF")
    assert name.startswith("_Z")
    assert name.encode() + b"\0" in image
    digest = hashlib.sha256(image).hexdigest()
    assert launch.loaded_sha256() == hashlib.sha256(digest.encode()).hexdigest()
    launch._kernel.cache_clear()


def test_a_v100_is_told_to_use_cuda_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 13 compiles for sm_75 and later; the error names both and what to install."""
    cupy: Any = ModuleType("cupy")
    cupy.cuda = ModuleType("cupy.cuda")
    cupy.cuda.nvrtc = SimpleNamespace(getSupportedArchs=lambda: [75, 80, 90], getVersion=lambda: (13, 0))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    with pytest.raises(
        RuntimeError, match=r"sm_70, and NVRTC of CUDA 13\.0 .* install zeropp-bench\[cuda12\]"
    ):
        launch.compile_kernels("dequantize.cu", ["k"], 70)
