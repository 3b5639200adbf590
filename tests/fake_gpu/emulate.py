"""Gives operations on fake GPUs their true values.

Each operation runs natively first: torch chooses a kernel, allocates the results, and launches on its streams, as on
a GPU; the kernels do nothing.  Then the same operation runs on the CPU, over the same memory.  This order keeps the
trace of what torch does, and a result is there when the native operation has returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from tests.fake_gpu import trace

CPU: Final = torch.device("cpu")
# Operations that read and write no element, or that copy through the runtime, which copies truly.
_NATIVE: Final = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::set_", "aten::resize_", "aten::record_stream", "aten::_local_scalar_dense", "aten::is_pinned"),
    *("aten::_pin_memory", "aten::detach_", "aten::lift", "aten::lift_fresh"),
}
_ELSEWHERE: Final = (
    "c10d::",
    "_c10d_functional::",
    "prim::",
    "profiler::",
)  # NCCL's, and those without values
_HALVES: Final = (torch.bfloat16, torch.float16)


class NotEmulatedError(NotImplementedError):
    """An operation whose values the CPU cannot supply."""


def on_cpu(tensor: Tensor) -> Tensor:
    """Returns a CPU tensor over the memory of a tensor of a fake GPU; others are returned as they are."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype).set_(
        whole, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    alias = torch._neg_view(alias) if tensor.is_neg() else alias
    return alias.conj() if tensor.is_conj() else alias


def _argument_on_cpu(value: object) -> object:
    if isinstance(value, Tensor):
        return on_cpu(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return None if isinstance(value, torch.Generator) else value


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def note_accesses(values: Iterable[object], name: str, *, writes: bool, host: bool = False) -> None:
    """Append accesses to the trace: of a GPU's tensors by its current stream, or of pinned ones by the ``host``."""
    for tensor in values:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if tensor.is_cuda is host:  # the runtime notes both sides of a copy between host and device
            continue
        extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else trace.HOST
        trace.access(stream, tensor.data_ptr(), (1 + extent) * tensor.itemsize, name, writes=writes)


def _note(
    func: Any, arguments: Sequence[Any], named: Mapping[str, Any], outputs: object, *, host: bool
) -> None:
    schema = func._schema
    given = dict(zip((argument.name for argument in schema.arguments), arguments, strict=False)) | dict(named)
    written = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    for name, value in given.items():
        note_accesses(tree_leaves(value), schema.name, writes=name in written, host=host)
    if not written:
        note_accesses(tree_leaves(outputs), schema.name, writes=True, host=host)


@contextlib.contextmanager
def _random_of(device: torch.device) -> Iterator[None]:
    """Draw the CPU's numbers from the state of the device's generator, and keep the CPU's own state."""
    state = torch.cuda.get_rng_state(device).numpy().tobytes()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(state).digest()[:7], "little"))
        yield


def moves_nothing(func: Any) -> bool:
    """Returns whether an operation of torch reads and writes no element, or does so elsewhere, as NCCL's do."""
    name = func._schema.name
    return bool(func.is_view or name in _NATIVE or name.startswith(_ELSEWHERE))


class Emulation(TorchDispatchMode):
    """Computes on the CPU what operations on a fake GPU should have computed; notes accesses if ``noting``."""

    noting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any("FakeTensor" in kind.__name__ or "Functional" in kind.__name__ for kind in types):
            return func(*args, **kwargs)
        if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
            return NotImplemented  # the subclass calls again, with its plain tensors
        device = next(
            (tensor.device for tensor in tensors if tensor.is_cuda),
            next((leaf for leaf in leaves if isinstance(leaf, torch.device) and leaf.type == "cuda"), None),
        )
        computes = not moves_nothing(func)
        if device is None:
            outputs = func(*args, **kwargs)
            if EMULATION.noting and computes:
                _note(func, args, kwargs, outputs, host=True)
            return outputs
        random = torch.Tag.nondeterministic_seeded in func.tags
        with _random_of(device) if random and computes else contextlib.nullcontext():
            outputs = func(*args, **kwargs)
            if not computes:
                return outputs
            with torch._C._DisableTorchDispatch():
                if EMULATION.noting:
                    _note(func, args, kwargs, outputs, host=False)
                computed = self._compute(func, args, kwargs, outputs)
        return computed if isinstance(outputs, bool | int | float) else outputs

    def _compute(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Run the operation on the CPU, and copy its results into ``outputs``, unless it writes its arguments."""
        args, kwargs = tree_map(_argument_on_cpu, (args, kwargs))
        kwargs.pop("pin_memory", None)
        mutates = func._schema.is_mutable
        try:
            results = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as problem:
            if mutates:
                raise NotEmulatedError(f"fake GPU: {func} on the CPU: {problem}") from problem
            results = func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        if not mutates:
            for target, result in zip(tree_leaves(outputs), tree_leaves(results), strict=True):
                if isinstance(target, Tensor) and isinstance(result, Tensor):
                    if target.shape != result.shape:  # it depends on values, which no kernel has counted
                        target.resize_(result.shape)
                    if on_cpu(target).data_ptr() != result.data_ptr():
                        on_cpu(target).copy_(result)
        return results


EMULATION: Final = Emulation()


def start() -> None:
    """Emulate from here on in this thread, in the threads of its backward passes, and in threads that Python starts."""
    # Fused attention returns what the CPU's does not, such as the state of its random numbers.
    torch.backends.cuda.enable_flash_sdp(enabled=False)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    EMULATION.__enter__()
    run = threading.Thread.run

    def emulated(self: threading.Thread) -> None:
        with Emulation():
            run(self)

    threading.Thread.run = emulated  # type: ignore[method-assign]


def kernel_folder() -> Path:
    """Returns the folder of the kernels that are compiled for the CPU."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "zeropp-bench" / "fake-kernels"
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def _host() -> Callable[[Any, torch.device], None]:
    from tests.cuda_on_cpu.host import Host  # it imports the kernels, which import this file's caller

    return Host(kernel_folder())


def on_device(launch: Any, device: torch.device, *, idle_bytes: int = 0) -> None:
    """Note a launch on torch's current stream, and carry it out on the CPU, unless values are none."""
    trace.note(trace.Kind.CODEC, torch.cuda.current_stream(device).cuda_stream, launch.kernel)
    if os.environ["FAKE_GPU_VALUES"] != "none":
        _host()(launch, device)


def start_kernels() -> None:
    """Put the CPU in the place of CuPy, once the module that launches kernels has been imported."""
    from impl.cuda import launch

    launch.on_device = on_device
