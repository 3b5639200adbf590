"""Defines lossless codecs, with which one can measure how far weights and gradients can be compressed unchanged.

Mantissas and signs of weights and gradients are random bits, which no coder shortens.  The exponents are not random:
most elements have one of a few exponents, so that about 2.6 of an exponent's 8 bits are information (ZipCCL,
2604.27844).  Elements are therefore cut into byte planes: plane k has byte k of every element.  Before that, the sign
bit of each element is moved to its end, so that the first plane has the exponents.  Each plane that is not random is
compressed with an entropy coder: Huffman's code in zlib, or the coder in zstd.

The number of bytes is known only after encoding.  A frame is therefore as large as the largest possible encoding, and
:meth:`_Lossless.used_bytes` returns how many bytes of the frame are used.  The messages of a policy have fixed sizes,
so policies refuse these codecs; ``examples/lossless.py`` sends sizes first and bytes afterwards.

A frame consists of:

- 1 byte: the element type, as its index in ``_KINDS``
- 7 bytes: zeros
- 32 bytes: four little-endian numbers, the stored bytes of each plane; 0 for planes that the element type lacks
- the planes, beginning with the exponents.  A plane with as many bytes as the row has elements is not compressed; a
  plane with fewer bytes is compressed.
"""

from __future__ import annotations

import zlib
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impl.codecs.codec import HALF_ULP, Dtype
from impl.codecs.reference import DTYPES, NAMES

HEADER: Final = 40  # bytes
_KINDS: Final = tuple(DTYPES)
_MOST_PLANES: Final = 4
_RANDOM: Final = 7.8  # a plane with at least so many bits of entropy in a byte is not compressed

Planes = NDArray[np.uint8]  # (bytes of an element, S)


class _Lossless:
    """Base class of the lossless codecs: a subclass chooses the coder, and may cast elements to bf16 first."""

    device = "cpu"
    laws: ClassVar = ["bound", "zero", "idempotent", "sign", "power_of_two", "nonfinite"]
    kinds: ClassVar[list[Dtype]] = ["fp32", "bf16", "fp16"]
    block = 1

    def frame_bytes(self, numel: int) -> int:
        """Returns the size of a frame: room for a header and ``numel`` elements in fp32 without compression."""
        return HEADER + 4 * numel

    def error_bound(self, low: float, high: float, out: Dtype) -> float:
        """Returns an upper bound of |decoded - x| for x in [low, high]: the error of rounding to type ``out``.

        Returns 0 for fp32, since encoding loses nothing.
        """
        return 0.0 if out == "fp32" else _rounding(low, high, out)

    def encode(self, x: Tensor, frame: Tensor) -> None:
        """Encode ``x`` (S,) fp32, bf16 or fp16 to ``frame`` (F,) uint8; bytes that are not used are set to 0."""
        stored = [self._smaller(plane) for plane in _cut(x)]
        sizes = [len(plane) for plane in stored]
        header = np.zeros(HEADER, np.uint8)
        header[0] = _KINDS.index(NAMES[x.dtype])
        header[8:].view("<i8")[: len(sizes)] = sizes
        used = np.frombuffer(b"".join([header.tobytes(), *stored]), np.uint8)
        frame.numpy()[: len(used)] = used
        frame[len(used) :] = 0

    def decode(self, frame: Tensor, out: Tensor) -> None:
        """Decode ``frame`` (F,) uint8 to ``out`` (S,), in the type of ``out``.

        Elements are rounded to this type.  Finite elements beyond the largest number of the type become this number.
        """
        numel, data = out.numel(), frame.contiguous().numpy()
        kind = DTYPES[_KINDS[int(data[0])]]
        planes, start = list[NDArray[np.uint8]](), HEADER
        for size in _sizes(data)[: kind.itemsize]:
            stored = data[start : start + size].tobytes()
            plain = stored if size == numel else self._decompress(stored, numel)
            planes.append(np.frombuffer(plain, np.uint8))
            start += size
        x = _joined(np.stack(planes), kind)
        out.copy_(x if kind == out.dtype else _within(x.float(), out.dtype))

    def used_bytes(self, frame: Tensor) -> int:
        """Returns how many bytes of a frame (F,) uint8 are used, from its beginning."""
        return HEADER + sum(_sizes(frame.contiguous().numpy()))

    def _smaller(self, plane: NDArray[np.uint8]) -> bytes:
        """Returns the bytes of a plane (S,) uint8, compressed if that makes them fewer, otherwise as they are.

        A plane has one byte of every element.  A plane whose bytes are almost random is not compressed, which saves
        time.
        """
        plain = plane.tobytes()
        compressed = self._compress(plain) if _entropy(plane) < _RANDOM else plain
        return compressed if len(compressed) < len(plain) else plain

    def _compress(self, plain: bytes) -> bytes:
        raise NotImplementedError

    def _decompress(self, compressed: bytes, size: int) -> bytes:
        raise NotImplementedError


class Zlib(_Lossless):
    """Compresses byte planes (plane k has byte k of every element) with the Huffman code of Python's module zlib."""

    def _compress(self, plain: bytes) -> bytes:
        # Huffman's code only, since exponents hardly ever contain the same sequence of bytes twice: a search for
        # repeated sequences would take 30 times as long, and make the result larger.
        coder = zlib.compressobj(wbits=-zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
        return coder.compress(plain) + coder.flush()

    def _decompress(self, compressed: bytes, size: int) -> bytes:
        return zlib.decompress(compressed, -zlib.MAX_WBITS, size)


class Zstd(_Lossless):
    """Compresses byte planes (plane k has byte k of every element) with zstd, of the package zstandard."""

    def _compress(self, plain: bytes) -> bytes:
        from zstandard import STRATEGY_FAST, ZstdCompressionParameters, ZstdCompressor

        # Exponents hardly ever contain the same sequence of bytes twice.  So the search for repeated sequences is made
        # as cheap as possible: its table has the smallest size, and it finds only long sequences.
        settings = ZstdCompressionParameters(strategy=STRATEGY_FAST, hash_log=6, min_match=7)
        # A coder serves one thread, and ranks may be threads.
        coder = ZstdCompressor(compression_params=settings)
        return bytes(coder.compress(plain))

    def _decompress(self, compressed: bytes, size: int) -> bytes:
        from zstandard import ZstdDecompressor

        return bytes(ZstdDecompressor().decompress(compressed, max_output_size=size))


class _Bf16(_Lossless):
    """Casts elements to bf16 before they are compressed; nothing is lost beyond this cast."""

    kinds: ClassVar[list[Dtype]] = ["fp32", "bf16"]

    def error_bound(self, low: float, high: float, out: Dtype) -> float:
        """Returns an upper bound of |decoded - x| for x in [low, high].

        The bound is the sum of two errors: the cast to bf16, and rounding to type ``out``.
        """
        return _rounding(low, high, "bf16") + _rounding(low, high, out)

    def encode(self, x: Tensor, frame: Tensor) -> None:
        """Cast ``x`` (S,) fp32 or bf16 to bf16, and encode it to ``frame`` (F,) uint8."""
        fits = x if x.dtype == torch.bfloat16 else _within(x, torch.bfloat16)
        super().encode(fits.to(torch.bfloat16), frame)


class ZlibBf16(_Bf16, Zlib):
    """Casts elements to bf16, and compresses their byte planes (plane k has byte k of every element) with zlib."""


class ZstdBf16(_Bf16, Zstd):
    """Casts elements to bf16, and compresses their byte planes (plane k has byte k of every element) with zstd."""


def _rounding(low: float, high: float, dtype: Dtype) -> float:
    """Returns an upper bound of the error of rounding a number in [low, high] to type ``dtype``."""
    relative, absolute = HALF_ULP[dtype]
    return max(abs(low), abs(high)) * relative + absolute


def _within(x: Tensor, kind: torch.dtype) -> Tensor:
    """Returns ``x`` (S,) fp32, with finite elements limited to the largest number of type ``kind``."""
    largest = torch.finfo(kind).max
    return torch.where(x.isinf(), x, x.clamp(-largest, largest))


def _sizes(frame: NDArray[np.uint8]) -> list[int]:
    """Returns how many bytes each of four planes takes in a frame; 0 for planes that the element type does not have.

    A plane has one byte of every element (:func:`_cut`).
    """
    return [int(size) for size in np.frombuffer(frame[8:HEADER].tobytes(), "<i8")]


def _cut(x: Tensor) -> Planes:
    """Cut elements ``x`` (S,) into byte planes, (bytes of an element, S) uint8; the first plane has the exponents.

    The sign bit of each element is first moved from the front to the end, behind the mantissa.  So the first byte of an
    fp32 or bf16 element is exactly the exponent, which has eight bits.  The first byte of an fp16 element has the five
    bits of the exponent and three bits of the mantissa.
    """
    size = x.element_size()
    bits = x.detach().contiguous().view(_WORDS[size]).numpy().view(f"u{size}")
    turned = (bits << 1) | (bits >> (8 * size - 1))
    return np.ascontiguousarray(turned.astype(f">u{size}").view(np.uint8).reshape(-1, size).T)


def _joined(planes: Planes, kind: torch.dtype) -> Tensor:
    """Return the elements (S,) of type ``kind`` whose bytes are in ``planes`` (bytes of an element, S) uint8.

    The function undoes :func:`_cut`.
    """
    size = len(planes)
    turned = np.ascontiguousarray(planes.T).view(f">u{size}").reshape(-1).astype(f"u{size}")
    bits = (turned >> 1) | (turned << (8 * size - 1))
    return torch.from_numpy(bits.view(f"i{size}")).view(kind)


_WORDS: Final = {2: torch.int16, 4: torch.int32}


def _entropy(plane: NDArray[np.uint8]) -> float:
    """Return the entropy of the bytes of a ``plane`` (S,) uint8, which is from 0 to 8 bits per byte."""
    counts = np.bincount(plane, minlength=256)
    shares = counts[counts > 0] / max(1, len(plane))
    return float(-(shares * np.log2(shares)).sum())
