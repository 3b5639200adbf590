"""The table of ``docs/reference/cuda_kernels.md``: what the compiled CUDA kernels ask of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from docs.tables.markdown import table
from impl.codecs.codec import FORMATS
from impl.cuda.kernels import VARIANTS
from tests.support.cubin import DEVICES, FORMAT, Cubin, Prediction, predictions, works

ARCHITECTURE: Final = 90
_PLAIN: Final = (
    *("kernels", "threads", "registers", "occupancy"),
    *("elements loaded", "stored"),
)


def render() -> str:
    """The tables, in Markdown; compiles every kernel, for which nothing may be ``missing``."""
    every = [each for file in VARIANTS for each in predictions(file, ARCHITECTURE)]
    plain = [
        (each.kernel, (*_resources(each), *_accesses(each.main)))
        for each in every
        if each.main and not FORMAT.fullmatch(each.kernel)
    ]
    shares = ("kernels", *(f"`sm_{architecture}`" for architecture in DEVICES))
    columns = ("format", "encode bf16", "decode bf16", "sum to fp32")
    return (
        f"Plain kernels, with the accesses of the main path:\n\n{table(_PLAIN, _equal(plain))}\n"
        f"Shares of a copy at most, and what limits them:\n\n{table(shares, _equal(_shares()))}\n"
        f"Of published formats on `sm_{ARCHITECTURE}`:\n\n{table(columns, _formats())}"
    )


def _shares() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Plain kernels with the shares that each device is predicted to reach."""
    for kernel in filter(lambda each: not FORMAT.fullmatch(each), works(ARCHITECTURE)):
        found = (works(architecture)[kernel].share(device) for architecture, device in DEVICES.items())
        yield kernel, tuple(f"{share:.0%} {limit}" for share, limit in found)


def _formats() -> Iterator[tuple[str, ...]]:
    """Published formats with their predicted shares."""
    for name in (name.partition(":")[2] for name in FORMATS.values()):
        kernels = (
            f"encode_format<{name}, Bf16>",
            f"decode_format<{name}, Bf16>",
            f"decode_format<{name}, Fp32>",
        )
        found = (works(ARCHITECTURE)[kernel].share(DEVICES[ARCHITECTURE]) for kernel in kernels)
        yield f"`{name.lower()}`", *(f"{share:.0%} {limit}" for share, limit in found)


def _resources(each: Prediction) -> tuple[str, ...]:
    return ", ".join(map(str, each.threads)), str(each.cubin.registers), f"{each.occupancy:.0%}"


def _accesses(main: Cubin) -> Iterator[str]:
    """Numbers and widths of the loads and stores of elements: ``4 of 16 B``."""
    for loads in (True, False):
        counts = Counter(
            access.width
            for access in main.accesses
            if access.loads is loads and access.purpose.startswith("elements")
        )
        yield ", ".join(f"{count} of {width} B" for width, count in sorted(counts.items(), reverse=True))


def _equal(rows: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """Rows in which kernels of equal columns share one."""
    kernels: dict[tuple[str, ...], list[str]] = {}
    for kernel, columns in rows:
        kernels.setdefault(columns, []).append(f"`{kernel}`")
    return ((", ".join(names), *columns) for columns, names in kernels.items())
