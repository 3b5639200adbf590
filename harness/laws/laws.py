"""Checks the laws of codecs: each function checks one property of one implementation on one row (a 1-D tensor).

A function raises a :class:`Violation` if the property does not hold.  The tests and ``zeropp check codecs`` run the
same functions.  A codec must keep the laws (:class:`impl.codecs.codec.Law`) that it declares.  Every codec must keep
the duties (:class:`Duty`).  A *claim* is a law or a duty.  A *frame* is the bytes into which a row is encoded.
"""

from __future__ import annotations

import enum
import functools
import math
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from impl.codecs import reference
from impl.codecs.codec import LARGEST, Block, Codec, Dtype, Law, Raw
from impl.codecs.reference import DTYPES, NAMES
from impl.codecs.rounding_noise import OCTET, Noise

FALSE_ALARM: Final = 1e-9  # largest probability that one try of UNBIASED blames an unbiased codec
DRAWS: Final = 4096  # encodings, each with its own random bits, of which UNBIASED takes the mean
DRAWN: Final = 64  # elements of a row that UNBIASED looks at, at most
_GUARD: Final = 32  # bytes or elements before and after a buffer, which must not be written
_EXPONENTS: Final = 30  # POWER_OF_TWO uses magnitudes from 2^-30 to 1, and scales by 2^-30 to 2^30
_FP16_EXPONENTS: Final = 6  # the same for a cast to fp16, whose normal numbers are 2^-14 to 2^16
_MODERATE: Final = 2.0**64  # where no magnitude exceeds this, error_bound must be finite
SOURCES: Final = (1, 2, 5)  # numbers of frames that sums add: 5 is more than kernels add in one pass
_QUIET: Final = Noise((0, 0, 0, 0))
_HARNESS: Final = Path(__file__).resolve().parents[1]
_LIBRARIES: Final = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
_NOT_USERS: Final = (_HARNESS, _HARNESS.parent / "impl", *_LIBRARIES)  # folders that hold no user's code


class Duty(enum.Enum):
    """Properties that every codec must have, whatever laws it declares."""

    FRAME = "every byte of the frame is written and none beyond it, and decoding depends on the frame alone"
    BITS = "frames and decoded elements equal the reference's, bit for bit"
    LOCAL = "changing one block changes no other block's decoded elements"
    SUM = "decode_sum is the fp32 sum of the decoded frames, added in ascending order"
    FUSED = "decode_sum_encode writes the frame of decode_sum's result, byte for byte"


Claim = Law | Duty


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """One implementation of a codec, to be checked."""

    name: str  # for messages
    promises: Codec  # declares the laws and the error bound
    frame_bytes: Callable[[int], int]  # from the elements of a row, the bytes of its frame
    # encode(x (..., S), frames (..., F) uint8, noise) writes frames; `noise` is for stochastic codecs.
    encode: Callable[[Tensor, Tensor, Noise], None]
    decode: Callable[[Tensor, Tensor], None]  # decode(frames (..., F), out (..., S)) writes elements
    # decode_sum(frames (sources, F), out (S,) fp32) writes the sum; None if the codec does not offer this.
    decode_sum: Callable[[Tensor, Tensor], None] | None
    # decode_sum_encode(frames (sources, F), out (F,), S, noise) writes the sum's frame; None if not offered.
    decode_sum_encode: Callable[[Tensor, Tensor, int, Noise], None] | None
    codec: Codec | None  # built-in codec or format that the subject must equal bit for bit, if any
    device: torch.device  # where its tensors are
    kinds: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")  # element types that it supports
    specification: bool = False  # whether it is the reference itself, which is not compared with itself

    @property
    def claims(self) -> tuple[Claim, ...]:
        """All properties to check: duties first, then the declared laws, in the order of :class:`Law`."""
        claims: dict[Claim, bool] = {
            Duty.FRAME: True,
            Duty.BITS: self.codec is not None and not self.specification,
            Duty.LOCAL: self.promises.block != "shard",
            Duty.SUM: self.decode_sum is not None,
            Duty.FUSED: self.decode_sum_encode is not None,
            **{law: law in self.promises.laws for law in Law},
        }
        return tuple(claim for claim, made in claims.items() if made)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """The row on which a claim (a law or a duty of a codec) is checked, and the other inputs of the check."""

    x: Tensor  # (S,) fp32, bf16 or fp16, on the CPU: the row
    out: Dtype = "fp32"  # type to decode to
    power: int = 1  # exponent of the factor that POWER_OF_TWO scales by, from -30 to 30
    noise: Noise = _QUIET  # random bits of the row, for a stochastic codec


class Violation(AssertionError):  # noqa: N818  # it is a finding, not an error of this program
    """Raised when a claim (a law or a duty of a codec) does not hold on row ``x``.

    ``frame`` (F,) uint8 is the encoded row; None if the row was not encoded.
    """

    def __init__(self, message: str, x: Tensor, frame: Tensor | None = None) -> None:
        super().__init__(message)
        self.x, self.frame = x.detach().cpu(), None if frame is None else frame.detach().cpu()


def attempt(subject: Subject, claim: Claim, case: Case) -> None:
    """Check one claim (a law or a duty) on one row; raise a :class:`Violation` if the claim does not hold."""
    _TRIALS[claim](subject, case)


def title(claim: Claim) -> str:
    """Return the name of a law or duty in lower case, as in tables and in the attribute ``laws`` of users' codecs."""
    return claim.name.lower()


def place(error: BaseException) -> str:
    """Return the innermost line of user code that an exception came from: ``codec.py line 12, in encode: ...``.

    Returns an empty text if no user code was involved.
    """
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(line.filename)
        if not line.filename.startswith("<frozen ") and not any(map(file.is_relative_to, _NOT_USERS)):
            name = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            return f"{name} line {line.lineno}, in {line.name}: {line.line}".removesuffix(": ")
    return ""


def blocks_of(x: Tensor, block: Block) -> Tensor:
    """Cut a row (S,) into blocks (blocks, size); a short last block is filled up with the row's last element.

    ``block`` is the number of elements in a block; with ``"shard"``, the whole row is one block.
    """
    size = x.numel() if block == "shard" else min(block, x.numel())
    return torch.cat([x, x[-1:].expand(-x.numel() % size)]).view(-1, size)


def _by_element(by_block: Tensor, block: Block, numel: int) -> Tensor:
    """Repeat the value of each block for all elements of the block: from (blocks,) to (``numel``,).

    ``block`` is the number of elements in a block; with ``"shard"``, all ``numel`` elements are one block.
    """
    return by_block.repeat_interleave(numel if block == "shard" else min(block, numel))[:numel]


@dataclass(frozen=True, slots=True, eq=False)
class _Trip:
    """A round trip: elements (..., S), their frames (..., F) and the decoded elements (..., S), on the CPU."""

    x: Tensor
    frame: Tensor
    decoded: Tensor

    def refuse(self, broken: Tensor, message: Callable[[int], str]) -> None:
        """Raise a Violation if the boolean tensor ``broken`` (S,) is true for any element of the row.

        The text of the Violation is ``message(i)``, where i is the index of the first such element.
        """
        if bool(broken.any()):
            raise Violation(message(int(broken.int().argmax())), self.x, self.frame)

    def check_equal(self, got: Tensor, wanted: Tensor, template: str) -> None:
        """Raise a Violation if two tensors (n,) differ; two NaN count as equal.

        The text of the Violation is ``template``, in which ``{i}`` is replaced with the index of the first difference,
        and ``{got}`` and ``{wanted}`` with the two values.
        """
        differs = ~_same(got, wanted)
        self.refuse(differs, lambda i: template.format(i=i, got=_text(got[i]), wanted=_text(wanted[i])))

    def decoded_text(self, i: int) -> str:
        """Describe element ``i`` and the value that it decodes to."""
        return f"element {i}: {_text(self.x[i])} decodes to {_text(self.decoded[i])}"


def _round_trip(subject: Subject, x: Tensor, noise: Noise, out: Dtype = "fp32") -> _Trip:
    """Encode ``x`` (..., S), and decode the result to elements of type ``out``.

    A stochastic codec uses the random bits of ``noise``.  The output buffers are filled with garbage beforehand, so
    that a byte or element that the codec does not write is noticed.
    """
    size = subject.frame_bytes(x.shape[-1])
    frames = torch.full((*x.shape[:-1], size), 0xA5, dtype=torch.uint8, device=subject.device)
    decoded = torch.full(x.shape, math.nan, dtype=DTYPES[out], device=subject.device)
    subject.encode(x.to(subject.device, copy=True), frames, noise)
    subject.decode(frames, decoded)
    return _Trip(x, frames.cpu(), decoded.cpu())


def _bound(subject: Subject, case: Case) -> None:
    """Check that each decoded element differs from the row's element by at most the declared error bound.

    An element whose bound is infinite is not checked; a NaN, for example, makes the bound of its whole block infinite.
    Before encoding, the row is clamped to magnitudes that all element types of the round trip can represent.
    """
    x = _representable(subject, case)
    trip, allowed = _round_trip(subject, x, case.noise, case.out), _bounds(subject, x, case.out)
    error = (trip.decoded.double() - x.double()).abs()
    trip.refuse(
        ~(error <= allowed) & allowed.isfinite(),
        lambda i: f"{trip.decoded_text(i)}, error {error[i]:.9g}, more than the bound {allowed[i]:.9g}",
    )


def _bounds(subject: Subject, x: Tensor, out: Dtype) -> Tensor:
    """Return the error bounds (S,) fp64 that a codec declares for the elements of ``x``, decoded to type ``out``.

    All elements of a block have the same bound.  The bound is infinite if the block has an element that is not finite.

    Raises:
        Violation: If the codec declares a bound that is NaN or minus infinity, or an infinite bound for a block whose
            magnitudes are all at most ``_MODERATE``.
    """
    rotated = (x if subject.codec is None else reference.rotated(subject.codec, x)).double()
    lows, highs = blocks_of(rotated, subject.promises.block).aminmax(dim=1)
    bounds = []
    for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
        bound = math.inf
        if math.isfinite(low) and math.isfinite(high):
            bound = float(subject.promises.error_bound(low, high, out))
            if not (math.isfinite(bound) or (bound > 0 and max(-low, high) > _MODERATE)):
                raise Violation(
                    f"error_bound({low:.9g}, {high:.9g}, {out!r}) is {bound}, expected a finite bound", x
                )
        bounds.append(bound)
    return _by_element(torch.tensor(bounds, dtype=torch.float64), subject.promises.block, x.numel())


def _zero(subject: Subject, case: Case) -> None:
    """Check that a block of zeros decodes to zeros, also next to blocks with other elements.

    The first, third, fifth block of the row and so on are replaced with zeros that keep the signs of the elements.
    """
    x = case.x.clone()
    blocks = len(blocks_of(x, subject.promises.block))
    zeros = _by_element(torch.arange(blocks) % 2 == 0, subject.promises.block, x.numel())
    x[zeros] = torch.copysign(torch.zeros_like(x), x)[zeros]
    trip = _round_trip(subject, x, case.noise)
    trip.refuse(zeros & (trip.decoded != 0), lambda i: f"{trip.decoded_text(i)}, in a block of zeros")


def _idempotent(subject: Subject, case: Case) -> None:
    """Check that decoded elements change by at most 2^-22 of their magnitude if they are encoded and decoded again.

    The last bit of a scale may cause a change of this size.
    """
    trip = _round_trip(subject, case.x, case.noise)
    once, twice = trip.decoded, _round_trip(subject, trip.decoded, case.noise).decoded
    close = _same(once, twice) | ((once - twice).abs() <= once.abs() * 2.0**-22)
    trip.refuse(
        ~close, lambda i: f"{trip.decoded_text(i)}, which decodes to {_text(twice[i])} in a second round trip"
    )


def _sign(subject: Subject, case: Case) -> None:
    """Check that a negated row decodes to the negated elements."""
    trip, mirrored = (_round_trip(subject, x, case.noise) for x in (case.x, -case.x))
    trip.refuse(
        ~_same(trip.decoded, -mirrored.decoded),
        lambda i: f"{trip.decoded_text(i)}, its negative to {_text(mirrored.decoded[i])}",
    )


def _power_of_two(subject: Subject, case: Case) -> None:
    """Check that multiplying a row by a power of two multiplies its decoded elements by the same power of two.

    The factor is 2^k, where k is the case's ``power``.  Before the check, the row is normalised: NaN and infinities are
    set to 0, the largest magnitude is brought between 1/2 and 1, and magnitudes below 2^-30 are set to 0.  All numbers
    then stay normal in fp32.  If the codec is a cast to fp16, magnitudes below 2^-6 are set to 0, and k is clamped to
    -6 to 6.
    """
    exponents = _FP16_EXPONENTS if subject.codec == Raw("fp16") else _EXPONENTS
    power = max(-exponents, min(exponents, case.power))
    x = case.x.float().nan_to_num(0.0, 0.0, 0.0)
    x = torch.ldexp(x, -torch.frexp(x.abs().max()).exponent)
    x = torch.where(x.abs() < 2.0**-exponents, 0.0, x)
    trip, scaled = (_round_trip(subject, row, case.noise) for row in (x, x * 2.0**power))
    trip.refuse(
        ~_same(trip.decoded * 2.0**power, scaled.decoded),
        lambda i: (
            f"{trip.decoded_text(i)}, 2^{power} times the element decodes to {_text(scaled.decoded[i])}"
        ),
    )


def _nonfinite(subject: Subject, case: Case) -> None:
    """Check that a NaN or an infinity decodes to itself, and that no finite element decodes to NaN.

    There is one exception: if a block has a NaN or an infinity, all elements of this block may decode to NaN together.
    """
    trip = _round_trip(subject, case.x, case.noise, case.out)
    x, decoded = case.x.float(), trip.decoded.float()
    finite, lost = (
        _by_element(blocks_of(marks, subject.promises.block).all(dim=1), subject.promises.block, x.numel())
        for marks in (x.isfinite(), decoded.isnan())
    )
    kept = torch.where(x.isfinite(), ~decoded.isnan(), _same(x, decoded)) | (~finite & lost)
    block = {True: "though its block is finite", False: "in a block that holds a NaN or an infinity"}
    trip.refuse(~kept, lambda i: f"{trip.decoded_text(i)}, {block[bool(finite[i])]}")


def _unbiased(subject: Subject, case: Case) -> None:
    """Check that stochastic rounding is unbiased: on average, an element decodes to itself.

    At most the first :data:`DRAWN` elements of the row are used.  Let S be the number of these elements.  They are
    encoded N = :data:`DRAWS` times with different random bits, and the N decoded values of each element are averaged.
    Let b be the element's declared error bound, and V the sample variance of its decoded values.  An element whose
    bound is infinite is not checked.  For any other element, the average may differ from the element by the sum of
    three terms:

    - ``sqrt(2 V L / N) + 14 b L / (3 (N - 1))`` with ``L = ln(4 S / FALSE_ALARM)``.  This is the empirical Bernstein
      bound (Maurer and Pontil 2009, theorem 4, two-sided), the part that chance explains.
    - ``2^-12 b``, because an element gets only 16 random bits, and the Hadamard rotation of some codecs rounds.
    - ``2^-22`` times the largest magnitude in the element's block.

    This check is fine enough to find a bias of 0.1 quantisation steps.
    """
    x = _representable(subject, case)[:DRAWN]
    numel = x.numel()
    rows = x.expand(DRAWS, numel).contiguous()
    noise = Noise(case.noise.philox, case.noise.start, (-(-numel // OCTET) * OCTET,))
    trips = _round_trip(subject, rows, noise)
    errors = trips.decoded.double() - x.double()
    mean, variance = errors.mean(dim=0), errors.var(dim=0)
    bound = _bounds(subject, x, "fp32")
    alarm = math.log(4 * numel / FALSE_ALARM)
    chance = (2 * variance * alarm / DRAWS).sqrt() + 14 * bound * alarm / (3 * (DRAWS - 1))
    largest = blocks_of(x.double().abs(), subject.promises.block).amax(dim=1)
    largest = _by_element(largest, subject.promises.block, numel)
    allowed = chance + bound * 2.0**-12 + largest * 2.0**-22
    _Trip(x, trips.frame[0], trips.decoded[0]).refuse(
        ~(mean.abs() <= allowed) & bound.isfinite(),
        lambda i: (
            f"element {i}: {_text(x[i])} decodes to {x[i].double() + mean[i]:.9g} on average of {DRAWS} draws; a "
            f"difference above {allowed[i]:.3g} happens by chance once in {1 / FALSE_ALARM:.0e} trials"
        ),
    )


def _frame(subject: Subject, case: Case) -> None:
    """Check that a codec writes exactly its output, and that decoding depends on the frame (the encoded row) alone.

    The row is encoded and decoded twice, in output buffers filled with different garbage.  Both runs must give the same
    frame and the same elements.  Encoding must not change the row, and decoding must not change the frame.  Neither may
    write the guard elements that lie before and after each output buffer.

    Then another row is encoded, and the first frame is decoded again.  The decoded elements must be the same as before.
    A codec that keeps state between calls fails this check.
    """
    x, numel = case.x, case.x.numel()
    size, trips = subject.frame_bytes(numel), []
    for rubbish, number in ((0x00, 7.0), (0xFF, math.nan)):
        buffer = torch.full((size + 2 * _GUARD,), rubbish, dtype=torch.uint8, device=subject.device)
        elements = torch.full((numel + 2 * _GUARD,), number, dtype=DTYPES[case.out], device=subject.device)
        frame, decoded = buffer[_GUARD : _GUARD + size], elements[_GUARD : _GUARD + numel]
        row = x.to(subject.device, copy=True)
        subject.encode(row, frame, case.noise)
        trip = _Trip(x, frame.cpu().clone(), decoded)
        subject.decode(frame, decoded)
        trip.refuse(~_same(row.cpu(), x), lambda i: f"encoding changed element {i} of its input")
        changed = frame.cpu() != trip.frame
        trip.refuse(changed, lambda i: f"decoding changed byte {i} of the {size} bytes of its input")
        trips.append(replace(trip, decoded=decoded.cpu().clone()))
        _refuse_beyond(buffer, rubbish, f"bytes beyond the frame's {size}", trip)
        _refuse_beyond(elements, number, f"elements beyond the row's {numel}", trip)
    trip, again = trips
    depends = "depends on what its buffer held before: {got} or {wanted}"
    trip.check_equal(trip.frame, again.frame, f"byte {{i}} of {size} {depends}")
    trip.check_equal(trip.decoded, again.decoded, f"element {{i}} {depends}")
    # A codec may keep something of the row it encoded last.  Encode a row that differs in every element, then
    # decode the first frame once more.
    other = torch.where(x > 0, -0.5, 3.0).to(x.dtype)
    _round_trip(subject, other, case.noise, case.out)
    later = torch.full_like(trip.decoded, 7.0, device=subject.device)
    subject.decode(trip.frame.to(subject.device, copy=True), later)
    message = "element {i} depends on more than its frame: {got}, but {wanted} after another row was encoded"
    trip.check_equal(trip.decoded, later.cpu(), message)


def _refuse_beyond(buffer: Tensor, held: float, name: str, trip: _Trip) -> None:
    """Raise a Violation if the codec wrote beyond its output, into the guards at both ends of ``buffer``.

    Args:
        buffer: The output buffer.  It begins and ends with ``_GUARD`` elements that are no part of the output.
        held: The value that these guard elements were filled with.
        name: Names the guard elements in the message, such as ``bytes beyond the frame's 64``.
        trip: The round trip, for the Violation.
    """
    guards = torch.cat([buffer[:_GUARD], buffer[-_GUARD:]])
    if not bool(_same(guards, torch.full_like(guards, held)).all()):
        raise Violation(f"{name} were written: write only inside the output buffer", trip.x, trip.frame)


def _bits(subject: Subject, case: Case) -> None:
    """Check that the frame and the decoded elements have the same bits as those of the reference implementation.

    Two decoded NaN count as equal, whatever their bits.
    """
    codec = subject.codec
    assert codec is not None  # noqa: S101  # only subjects with a codec have this claim
    numel = case.x.numel()
    size, expected = subject.frame_bytes(numel), codec.frame_bytes(numel)
    if size != expected:
        raise Violation(
            f"a frame of {numel} elements has {size} bytes, but the reference's frame has {expected}", case.x
        )
    trip = _round_trip(subject, case.x, case.noise, case.out)
    wanted, elements = torch.empty_like(trip.frame), torch.empty_like(trip.decoded)
    reference.encode(codec, case.x, wanted, noise=case.noise if codec.stochastic else None)
    reference.decode(codec, wanted, elements)
    trip.check_equal(trip.frame, wanted, "byte {i} of the frame is {got}, the reference's {wanted}")
    bits = {4: torch.int32, 2: torch.int16}[elements.element_size()]
    equal = (trip.decoded.view(bits) == elements.view(bits)) | (trip.decoded.isnan() & elements.isnan())
    trip.refuse(~equal, lambda i: f"{trip.decoded_text(i)}, in the reference to {_text(elements[i])}")


def _local(subject: Subject, case: Case) -> None:
    """Check that a change of the first, a middle or the last block changes no decoded element of other blocks.

    If the codec declares ``NONFINITE``, a block is also changed to NaN.
    """
    x = case.x
    count, size = blocks_of(x, subject.promises.block).shape
    trip = _round_trip(subject, x, case.noise, case.out)
    nans = [math.nan] if Law.NONFINITE in subject.promises.laws else []
    for number in sorted({0, count // 2, count - 1}):
        elements = slice(number * size, min((number + 1) * size, x.numel()))
        block = x[elements].float()
        others = [torch.where(block.abs() > 1, block / 256, block * 256 + 3), *(block + nan for nan in nans)]
        for other in others:
            changed = x.clone()
            changed[elements] = other.to(x.dtype)
            again = _round_trip(subject, changed, case.noise, case.out)
            differs = ~_same(trip.decoded, again.decoded)
            differs[elements] = False
            once = f"after elements {elements.start} to {elements.stop - 1}, another block, were changed"
            trip.refuse(differs, lambda i: f"{trip.decoded_text(i)}, and to {_text(again.decoded[i])} {once}")  # noqa: B023


def _sources(subject: Subject, case: Case) -> Tensor:
    """Encode five variants of the case's row, and return their frames (5, F) uint8.

    The variants are the row itself, the reversed row, -0.5 times the row, the row cyclically shifted by one element,
    and 0.125 times the row.  Checks of functions that add up frames (encoded rows) use these frames.
    """
    x = case.x
    rows = [x, x.flip(0), (x.float() * -0.5).to(x.dtype), x.roll(1), (x.float() * 0.125).to(x.dtype)]
    return torch.stack([_round_trip(subject, row, case.noise).frame for row in rows]).to(subject.device)


def _summed(subject: Subject, frames: Tensor, numel: int) -> Tensor:
    """Decode ``frames`` (n, F) one by one, and return the sum of the decoded rows, added in the order of the frames.

    A frame is an encoded row of ``numel`` elements.  The sum is (``numel``,) fp32 on the subject's device.
    """
    terms = torch.full((len(frames), numel), math.nan, device=subject.device)
    for frame, term in zip(frames, terms, strict=True):
        subject.decode(frame, term)
    total: Tensor = functools.reduce(torch.add, terms)
    return total


def _sum(subject: Subject, case: Case) -> None:
    """Check that the codec's ``decode_sum`` gives exactly the sum of the decoded frames, added one by one.

    Zeros of either sign count as equal, and so do two NaN.  This is checked for 1, 2 and 5 frames (:data:`SOURCES`).
    """
    assert subject.decode_sum is not None  # noqa: S101  # only subjects with this function have the claim
    numel = case.x.numel()
    frames = _sources(subject, case)
    for sources in SOURCES:
        buffer = torch.full((numel + 2 * _GUARD,), 7.0, device=subject.device)
        total = buffer[_GUARD : _GUARD + numel]
        subject.decode_sum(frames[:sources], total)
        trip = _Trip(case.x, frames[0].cpu(), total.cpu().clone())
        wanted = _summed(subject, frames[:sources], numel).cpu()
        message = (
            f"element {{i}} of the sum of {sources} frames is {{got}}, but {{wanted}} if they are added one by "
            "one"
        )
        trip.check_equal(trip.decoded, wanted, message)
        _refuse_beyond(buffer, 7.0, f"elements beyond the row's {numel}", trip)


def _fused(subject: Subject, case: Case) -> None:
    """Check that ``decode_sum_encode`` writes the same bytes as decoding, adding and encoding in separate calls.

    This is checked for 1, 2 and 5 frames, or encoded rows (:data:`SOURCES`).
    """
    assert subject.decode_sum_encode is not None  # noqa: S101  # only subjects with this function have the claim
    numel, frames = case.x.numel(), _sources(subject, case)
    for sources in SOURCES:
        buffer = torch.full((frames.shape[1] + 2 * _GUARD,), 0xA5, dtype=torch.uint8, device=subject.device)
        frame, wanted = buffer[_GUARD : _GUARD + frames.shape[1]], torch.zeros_like(frames[0])
        subject.decode_sum_encode(frames[:sources], frame, numel, case.noise)
        subject.encode(_summed(subject, frames[:sources], numel), wanted, case.noise)
        trip = _Trip(case.x, frame.cpu().clone(), case.x)
        message = (
            f"byte {{i}} of the frame of the sum of {sources} frames is {{got}}, but {{wanted}} if they are "
            "decoded, added and encoded in separate calls"
        )
        trip.check_equal(_one_nan(subject, trip.frame), _one_nan(subject, wanted.cpu()), message)
        _refuse_beyond(buffer, 0xA5, f"bytes beyond the frame's {frames.shape[1]}", trip)


_TRIALS: Final[dict[Claim, Callable[[Subject, Case], None]]] = {
    Law.BOUND: _bound,
    Law.ZERO: _zero,
    Law.IDEMPOTENT: _idempotent,
    Law.SIGN: _sign,
    Law.POWER_OF_TWO: _power_of_two,
    Law.NONFINITE: _nonfinite,
    Law.UNBIASED: _unbiased,
    Duty.FRAME: _frame,
    Duty.BITS: _bits,
    Duty.LOCAL: _local,
    Duty.SUM: _sum,
    Duty.FUSED: _fused,
}


def _representable(subject: Subject, case: Case) -> Tensor:
    """Return the case's row, clamped to the range that every element type of its round trip can represent.

    A round trip has up to three types: the type of the row, the type to decode to and, if the codec is a cast, the type
    that the codec casts to.
    """
    types = {case.out, NAMES[case.x.dtype]}
    types |= {subject.codec.dtype} if isinstance(subject.codec, Raw) else set()
    limit = min(LARGEST[kind] for kind in types)
    if "bf16" in types and "fp16" in types:
        limit = 255 * 2.0**8  # the largest number of bf16 below fp16's largest
    return case.x.float().clamp(-limit, limit).to(case.x.dtype)


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Return, for each element, whether two tensors are equal or both NaN.  Zeros of either sign are equal."""
    return (a == b) | (a.isnan() & b.isnan())


def _one_nan(subject: Subject, frame: Tensor) -> Tensor:
    """Return a frame in which all NaN have the same bits, so that two frames can be compared byte by byte.

    Only frames of casts (fp32, bf16 and fp16) are changed, since a NaN in them may have any of a NaN's bit patterns.
    Frames of other codecs are returned as they are.
    """
    if not isinstance(subject.codec, Raw):
        return frame
    values = frame.view(DTYPES[subject.codec.dtype])
    return torch.where(values.isnan(), math.nan, values).view(torch.uint8)


def _text(value: Tensor) -> str:
    return f"{value.item():02x}" if value.dtype == torch.uint8 else f"{value.item():.9g}"
