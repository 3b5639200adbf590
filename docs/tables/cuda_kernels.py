"""Tables of ``docs/reference/cuda_kernels.md``: resources and predicted speed of the compiled CUDA kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from docs.tables.markdown import table
from impl.codecs.codec import FORMATS
from tests.support.cubin import FORMAT, Cubin
from tests.support.sass.executed import DEVICES, Executed, executed, plain, works

ARCHITECTURE: Final = 90
DEVICE: Final = "H100"
_PLAIN: Final = (
    *("kernels", "threads", "registers", "occupancy"),
    *("elements loaded", "stored"),
)
_CODED: Final = (("encode", "Bf16"), ("decode", "Bf16"), ("decode", "Fp32"))


def render() -> str:
    """Compile every kernel and return the tables in Markdown.

    This needs the programs that :func:`tests.support.cubin.missing` looks for.
    """
    runs = [executed(kernel, ARCHITECTURE) for kernel in plain() if not FORMAT.fullmatch(kernel)]
    resources = [(run.cubin.kernel, (*_resources(run.cubin), *_accesses(run))) for run in runs]
    shares = ("kernels", "instructions", *DEVICES)
    columns = ("format", "encode bf16", "decode bf16", "sum to fp32")
    return (
        f"### Resources of plain kernels\n\n{table(_PLAIN, _equal(resources))}\n"
        f"### Largest share of a copy's rate, and what limits it\n\n{table(shares, _equal(_shares()))}\n"
        f"### Largest share of published formats on an {DEVICE}\n\n{table(columns, _equal(_formats()))}"
    )


def _shares() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every plain kernel with its instructions for an element, and its predicted share on each device."""
    for kernel in filter(lambda name: not FORMAT.fullmatch(name), plain()):
        count = executed(kernel, ARCHITECTURE).an_element
        yield kernel, (f"{count:.0f}", *(_share(kernel, device) for device in DEVICES))


def _formats() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every published format with its predicted shares."""
    for text, name in FORMATS.items():
        kernels = (f"{verb}_format<{name.partition(':')[2]}, {dtype}>" for verb, dtype in _CODED)
        yield text, tuple(_share(kernel, DEVICE) for kernel in kernels)


def _share(kernel: str, device: str) -> str:
    """Return the predicted share of a copy's rate, and what limits it."""
    share, limit = works(DEVICES[device].architecture)[kernel].share(DEVICES[device])
    return limit if limit == "memory" else f"{share:.0%} {limit}"


def _resources(cubin: Cubin) -> tuple[str, ...]:
    return ", ".join(map(str, cubin.threads)), str(cubin.registers), f"{cubin.occupancy[0]:.0%}"


def _accesses(run: Executed) -> Iterator[str]:
    """Yield counts and widths of the loads, then of the stores of elements: ``4x16 B``."""
    for loads in (True, False):
        counts = Counter(
            access.width
            for access in run.accesses
            if access.loads is loads and access.purpose.startswith("elements")
        )
        yield ", ".join(f"{count}x{width} B" for width, count in sorted(counts.items(), reverse=True))


def _equal(rows: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """Yield one row for each group of kernels with equal columns.

    If a group holds all variants of a kernel, they are printed as ``all `name```.
    """
    kernels: dict[tuple[str, ...], list[str]] = {}
    for kernel, columns in rows:
        kernels.setdefault(columns, []).append(kernel)
    every = Counter(kernel.partition("<")[0] for names in kernels.values() for kernel in names)
    for columns, names in kernels.items():
        variants = Counter(kernel.partition("<")[0] for kernel in names)
        whole = {base for base, count in variants.items() if count == every[base] > 1}
        shown = (
            f"all `{base}`" if (base := name.partition("<")[0]) in whole else f"`{name}`" for name in names
        )
        yield ", ".join(dict.fromkeys(shown)), *columns
