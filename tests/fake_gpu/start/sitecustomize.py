"""Puts every Python process whose PYTHONPATH has this folder onto fake GPUs (``tests.fake_gpu.build.environment``).

Python imports this file when it starts, also in ranks that a launcher starts.  The fake libraries are loaded at
once.  When torch has been imported, operations on fake GPUs get true values, and when the launcher of the CUDA
kernels has been imported, kernels run on the CPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from tests.fake_gpu import build


def _operations() -> None:
    if os.environ["FAKE_GPU_VALUES"] != "none":
        from tests.fake_gpu import emulate

        emulate.start()


def _kernels() -> None:
    from tests.fake_gpu import emulate

    emulate.start_kernels()


_AFTER: Final[dict[str, Callable[[], None]]] = {"torch": _operations, "impl.cuda.launch": _kernels}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after the first import of a module."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._asking or name not in _AFTER:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if (then := _AFTER.pop(name, None)) is not None:
                then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


build.load()
sys.meta_path.insert(0, _AfterImport())
