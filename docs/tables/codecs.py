"""Tables of ``docs/reference/codecs.md``: sizes and laws of codecs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from docs.tables.markdown import table
from harness.laws.laws import title
from impl.codecs.codec import HALF_ULP, BuiltIn, FloatCodec, Law, Raw, built_in

SHOWN: Final = (
    "fp32", "bf16", "fp16",
    "int8:2048", "int8:256", "int8:shard", "int7:256", "int6:256", "int5:256", "int4:256", "int3:256",
    "int2:256", "int8:256:asym", "int4:256:asym", "int8:256:clip", "int4:256:clip",
    "fp8e4m3:128", "fp8e5m2:128", "fp8e4m3:shard", "mxfp8", "mxfp8e5m2", "mxfp4",
    "int8:256:stochastic", "int4:256:stochastic", "int4:256:asym:stochastic", "fp8e4m3:128:stochastic",
    "mxfp4:stochastic",
    "int4:256:hadamard32", "mxfp4:hadamard32", "int4:256:hadamard32:stochastic",
)  # fmt: skip
_SHARD: Final = 1 << 20  # elements of the shard whose bits per element, scales included, are shown


def render() -> str:
    """Return the tables in Markdown."""
    codecs = {text: built_in(text) for text in SHOWN}
    common = [law for law in Law if all(law in codec.laws for codec in codecs.values())]
    rows = table(
        ("codec", "bits an element", "error of fp32 at most", "further laws"),
        (_row(text, codec, common) for text, codec in codecs.items()),
    )
    laws = table(("law", "meaning"), ((f"`{title(law)}`", law.value) for law in Law))
    promised = ", ".join(f"`{title(law)}`" for law in common)
    return f"All codecs in this table promise {promised}.\n\n{rows}\n{laws}"


def formula(codec: BuiltIn) -> str:
    """Return the formula of the largest error of an element of a finite block, decoded to fp32.

    It is exact to within 2^-14 and one rounding; ``codec.error_bound`` is the exact bound.  ``max`` is the
    largest magnitude of the block, ``range`` its largest element minus its smallest, after a rotation if
    there is one.
    """
    if isinstance(codec, Raw):
        return "0" if codec.dtype == "fp32" else f"max / {1 / HALF_ULP[codec.dtype][0]:.0f}"
    if not isinstance(codec, FloatCodec):
        steps = codec.largest
        if codec.clipped:  # the largest element is off by a whole step
            return f"{f'{codec.hadamard} * ' if codec.hadamard else ''}max / {codec.steps}"
    elif codec.scale == "e8m0":  # the largest element may be the smallest of its binade
        steps = 1 << codec.mantissa
    else:
        steps = int(codec.largest / 2.0 ** (int(codec.largest).bit_length() - 1 - codec.mantissa))
    measure = "range" if codec.asymmetric else "max"
    rotation = f"{codec.hadamard} * " if codec.hadamard else ""
    return f"{rotation}{measure} / {steps if codec.stochastic else 2 * steps}"


def _row(text: str, codec: BuiltIn, common: Collection[Law]) -> list[str]:
    bits = f"{codec.frame_bytes(_SHARD) * 8 / _SHARD:.4f}".rstrip("0").rstrip(".")
    further = ", ".join(title(law) for law in Law if law in codec.laws and law not in common)
    return [f"`{text}`", bits, f"`{formula(codec)}`", further]
