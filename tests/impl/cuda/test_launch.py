"""What is asked of CuPy to launch a kernel; its calls are noted, for which no GPU is needed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from impl.codecs.codec import parse
from impl.cuda import launch
from impl.cuda.kernels import Kernels
from impl.cuda.launch import ARGUMENTS, Launch, on_device


class Noted:
    """CuPy as far as it is asked; what it would launch is in ``launched``, on which device and stream."""

    def __init__(self) -> None:
        self.at: list[Any] = []  # device, then stream, inside their contexts
        self.loaded: list[tuple[Path, str]] = []
        self.launched: list[dict[str, Any]] = []
        self.max_dynamic_shared_size_bytes = 0

    @contextlib.contextmanager
    def inside(self, what: Any) -> Iterator[None]:
        self.at.append(what)
        yield
        self.at.pop()

    def module(self, *, path: str) -> Noted:
        self.loaded.append((Path(path), ""))
        return self

    def get_function(self, name: str) -> Noted:
        self.loaded[-1] = self.loaded[-1][0], name
        return self

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int) -> None:
        said = {"grid": grid, "block": block, "arguments": args, "shared": shared_mem}
        allowed = {"allowed": self.max_dynamic_shared_size_bytes}
        self.launched.append({**said, **allowed, "device": self.at[0].number, "stream": self.at[1]})


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Noted]:
    import cupy

    found = Noted()

    class Device:
        compute_capability = "90"

        def __init__(self, number: int) -> None:
            self.number, self.context = number, found.inside(self)

        def __enter__(self) -> None:
            self.context.__enter__()

        def __exit__(self, *said: object) -> None:
            self.context.__exit__(*said)  # type: ignore[arg-type]

    class Stream:
        from_external = found.inside

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(cupy.cuda, "Device", Device)
    monkeypatch.setattr(cupy.cuda, "Stream", Stream)
    monkeypatch.setattr(cupy, "RawModule", found.module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(launch, "_LOADED", {})
    launch._kernel.cache_clear()
    yield found
    launch._kernel.cache_clear()


def test_a_launch_is_on_torchs_stream_of_the_tensors_device(noted: Noted) -> None:
    """Grid, threads and the one argument as the launch says; a kernel is loaded once a device."""
    launches: list[Launch] = []
    codec, x = parse("int8:256"), torch.zeros(5000)
    frame = torch.zeros(codec.frame_bytes(5000), dtype=torch.uint8)
    Kernels(lambda one, _: launches.append(one)).encode(codec, x, frame)
    (one,) = launches
    for index, idle in ((1, 0), (0, 0), (1, 100 << 10)):
        on_device(one, torch.device("cuda", index), idle_bytes=idle)
        last = noted.launched[-1]
        assert (last["device"], last["stream"]) == (index, f"stream of cuda:{index}")
        assert (last["grid"], last["block"], last["shared"]) == (one.grid, (one.threads, 1, 1), idle)
        assert last["allowed"] >= idle
        (argument,) = last["arguments"]
        assert argument.dtype.fields is None  # so that its description costs nothing
        assert argument.tobytes() == one.arguments.tobytes()
        assert argument.itemsize == ARGUMENTS.itemsize
        assert argument.size == 1  # CuPy passes such an array by value
    assert len(noted.loaded) == 2
    assert len({path.read_bytes() for path, _ in noted.loaded}) == 1  # one architecture
    image = hashlib.sha256(noted.loaded[0][0].read_bytes()).hexdigest()
    assert launch.loaded_sha256() == hashlib.sha256(image.encode()).hexdigest()
    for path, name in noted.loaded:
        assert path.read_bytes().startswith(b"\x7fELF")
        assert name.startswith("_Z")
        assert name.encode() + b"\0" in path.read_bytes()
    assert not noted.at
