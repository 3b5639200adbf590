"""The table of ``docs/reference/cuda_kernels.md``: what the compiled CUDA kernels ask of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from docs.tables.markdown import table
from impl.cuda.cubin import Access, Prediction, predictions
from impl.cuda.kernels import VARIANTS

ARCHITECTURE: Final = 90
_HEAD: Final = (
    *("kernel", "threads", "registers", "shared, B", "local, B", "occupancy", "limited by"),
    *("elements: loads", "stores", "codes: loads", "stores"),
)


def render() -> str:
    """The tables, in Markdown; compiles every kernel, for which nothing may be ``missing``."""
    every = [each for file in VARIANTS for each in predictions(file, ARCHITECTURE)]
    plain = table(_HEAD, (_row(each) for each in every if each.main is not None))
    general = table(_HEAD, (_row(each) for each in every if each.main is None))
    return (
        f"Plain kernels, accesses of the main path:\n\n{plain}\nGeneral kernels, all accesses:\n\n{general}"
    )


def _row(each: Prediction) -> list[str]:
    accesses = (each.main or each.cubin).accesses
    columns = [
        _widths(access for access in accesses if access.loads is loads and access.purpose.startswith(purpose))
        for purpose in ("elements", "codes")
        for loads in (True, False)
    ]
    threads = ", ".join(map(str, each.threads))
    resources = (each.cubin.registers, each.cubin.shared, each.cubin.local)
    return [f"`{each.kernel}`", threads, *map(str, resources), f"{each.occupancy:.0%}", each.limit, *columns]


def _widths(accesses: Iterable[Access]) -> str:
    counts = Counter(access.width for access in accesses)
    return ", ".join(f"{count} x {width} B" for width, count in sorted(counts.items(), reverse=True))
