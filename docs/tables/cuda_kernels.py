"""The table of ``docs/reference/cuda_kernels.md``: what the compiled CUDA kernels ask of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from docs.tables.markdown import table
from impl.codecs.codec import FORMATS
from tests.support.cubin import DEVICES, FORMAT, VARIANTS, Cubin, compiled, main_paths, works

ARCHITECTURE: Final = 90
_PLAIN: Final = (
    *("kernels", "threads", "registers", "occupancy"),
    *("elements loaded", "stored"),
)
_CODED: Final = (("encode", "Bf16"), ("decode", "Bf16"), ("decode", "Fp32"))


def render() -> str:
    """The tables, in Markdown; compiles every kernel, for which nothing may be ``missing``."""
    plain = [
        (kernel, (*_resources(cubin), *_accesses(mains[kernel])))
        for file, kernels in VARIANTS.items()
        for mains in [main_paths(file, ARCHITECTURE)]
        for kernel, cubin in compiled(file, kernels, ARCHITECTURE).items()
        if kernel in mains and not FORMAT.fullmatch(kernel)
    ]
    shares = ("kernels", *(f"`sm_{architecture}`" for architecture in DEVICES))
    columns = ("format", "encode bf16", "decode bf16", "sum to fp32")
    return (
        f"Plain kernels, with the accesses of the main path:\n\n{table(_PLAIN, _equal(plain))}\n"
        f"Shares of a copy at most, and what limits them:\n\n{table(shares, _equal(_shares()))}\n"
        f"Of published formats on `sm_{ARCHITECTURE}`:\n\n{table(columns, _equal(_formats()))}"
    )


def _shares() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Plain kernels with the shares that each device is predicted to reach."""
    for kernel in filter(lambda each: not FORMAT.fullmatch(each), works(ARCHITECTURE)):
        found = (works(architecture)[kernel].share(device) for architecture, device in DEVICES.items())
        yield kernel, tuple("memory" if one[1] == "memory" else f"{one[0]:.0%} {one[1]}" for one in found)


def _formats() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Published formats with their predicted shares."""
    for text, name in FORMATS.items():
        kernels = (f"{what}_format<{name.partition(':')[2]}, {kind}>" for what, kind in _CODED)
        found = (works(ARCHITECTURE)[kernel].share(DEVICES[ARCHITECTURE]) for kernel in kernels)
        yield text, tuple("memory" if one[1] == "memory" else f"{one[0]:.0%} {one[1]}" for one in found)


def _resources(cubin: Cubin) -> tuple[str, ...]:
    return ", ".join(map(str, cubin.threads)), str(cubin.registers), f"{cubin.occupancy[0]:.0%}"


def _accesses(main: Cubin) -> Iterator[str]:
    """Numbers and widths of the loads and stores of elements: ``4x16 B``."""
    for loads in (True, False):
        counts = Counter(
            access.width
            for access in main.accesses
            if access.loads is loads and access.purpose.startswith("elements")
        )
        yield ", ".join(f"{count}x{width} B" for width, count in sorted(counts.items(), reverse=True))


def _equal(rows: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """Rows in which kernels of equal columns share one; all of a name, if there are several, as that."""
    kernels: dict[tuple[str, ...], list[str]] = {}
    for kernel, columns in rows:
        kernels.setdefault(columns, []).append(kernel)
    every = Counter(kernel.partition("<")[0] for names in kernels.values() for kernel in names)
    for columns, names in kernels.items():
        here = Counter(kernel.partition("<")[0] for kernel in names)
        whole = {name for name, count in here.items() if count == every[name] > 1}
        shown = (
            f"all `{each}`" if (each := name.partition("<")[0]) in whole else f"`{name}`" for name in names
        )
        yield ", ".join(dict.fromkeys(shown)), *columns
