"""The table of ``docs/reference/cuda_kernels.md``: what the compiled CUDA kernels ask of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from docs.tables.markdown import table
from impl.cuda.kernels import VARIANTS
from tests.support.cubin import DEVICES, Cubin, Prediction, predictions, works

ARCHITECTURE: Final = 90
_PLAIN: Final = (
    *("kernels", "threads", "registers", "occupancy"),
    *("elements loaded", "stored", "codes loaded", "stored"),
)
_PIPES: Final = ("issue", "FMA", "IMAD", "ALU", "LSU")


def render() -> str:
    """The tables, in Markdown; compiles every kernel, for which nothing may be ``missing``."""
    every = [each for file in VARIANTS for each in predictions(file, ARCHITECTURE)]
    plain = [(each.kernel, (*_resources(each), *_accesses(each.main))) for each in every if each.main]
    general = [(each.kernel, (*_resources(each), str(each.cubin.shared))) for each in every if not each.main]
    shares = ("kernels", *_PIPES, *(f"sm_{architecture}" for architecture in DEVICES))
    return (
        f"Plain kernels, with the accesses of the main path:\n\n{table(_PLAIN, _equal(plain))}\n"
        f"Instructions for eight elements, and shares of a copy:\n\n{table(shares, _equal(_shares()))}\n"
        f"General kernels:\n\n{table((*_PLAIN[:4], 'shared, B'), _equal(general))}"
    )


def _shares() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Plain kernels with their instructions for :data:`ARCHITECTURE`, and predicted shares for each."""
    for kernel, work in works(ARCHITECTURE).items():
        counts = (f"{work.instructions[pipe]:.0f}" for pipe in _PIPES)
        found = (works(architecture)[kernel].share(device) for architecture, device in DEVICES.items())
        yield kernel, (*counts, *(f"{share:.0%} {limit}" for share, limit in found))


def _resources(each: Prediction) -> tuple[str, ...]:
    return ", ".join(map(str, each.threads)), str(each.cubin.registers), f"{each.occupancy:.0%}"


def _accesses(main: Cubin) -> Iterator[str]:
    """Numbers and widths of the loads and stores, of elements and of codes: ``4 of 16 B``."""
    for purpose in ("elements", "codes"):
        for loads in (True, False):
            counts = Counter(
                access.width
                for access in main.accesses
                if access.loads is loads and access.purpose.startswith(purpose)
            )
            yield ", ".join(f"{count} of {width} B" for width, count in sorted(counts.items(), reverse=True))


def _equal(rows: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """Rows in which kernels of equal columns share one."""
    kernels: dict[tuple[str, ...], list[str]] = {}
    for kernel, columns in rows:
        kernels.setdefault(columns, []).append(f"`{kernel}`")
    return ((", ".join(names), *columns) for columns, names in kernels.items())
