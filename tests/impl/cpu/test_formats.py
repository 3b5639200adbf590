"""The C++ kernels of published formats equal their torch operations bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.laws.adversarial_rows import long_row, rows
from impl.codecs import own_rows, reference
from impl.codecs.codec import FORMATS, parse
from impl.codecs.published_formats import _NF4, _float_table
from tests.impl.codecs.properties import (
    BUDGET,
    DTYPES,
    FLOATS,
    Backend,
    check,
    check_carried,
    encoded,
    same,
    use_all,
)
from tests.support.strategies import blocks_of_values

TEXTS = list(FORMATS)
TABLES = {
    "nvfp4": _float_table(4, 1, 0), "mxfp6e2m3": _float_table(6, 3, 0), "mxfp6e3m2": _float_table(6, 2, -2),
    "nf4": _NF4, "spike2": tuple(range(4)), "spike3": tuple(range(8)),
}  # fmt: skip


def size_of(text: str) -> int:
    return {"nvfp4": 16, "nf4": 64, "mxfp6e2m3": 32, "mxfp6e3m2": 32, "bf16sr": 8}.get(text, 128)


@pytest.mark.parametrize("text", TEXTS)
@BUDGET
@given(data=st.data(), kind=DTYPES, out=DTYPES, skew=st.sampled_from([0, 3]))
def test_hostile_rows_are_coded_as_by_torch(
    backend: Backend, *, text: str, data: st.DataObject, kind: torch.dtype, out: torch.dtype, skew: int
) -> None:
    """Ties, denormals, extremes, NaN, infinities and short last blocks give the bytes of the torch operations."""
    for x in (data.draw(rows(size_of(text))), data.draw(blocks_of_values(most=300, finite=False))):
        check(backend, parse(text), x.to(kind), out, skew=skew)


@pytest.mark.parametrize(("text", "table"), TABLES.items())
@pytest.mark.parametrize("scale", [1.0, 3.0, 1.1754944e-38, 7e-42, 1.3e37])
def test_numbers_beside_every_tie_are_coded_as_by_torch(
    backend: Backend, text: str, table: tuple[float, ...], scale: float
) -> None:
    """Halfway between two entries, and up to 3 ulps on either side, the same entry is chosen."""
    entries = torch.tensor(table)
    middles = torch.cat([(entries[1:] + entries[:-1]) / 2, entries])
    near = (middles.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32)
    near = near.flatten()[near.flatten().abs() <= max(table)]
    near = torch.nn.functional.pad(near, (0, -near.numel() % 8)).view(-1, 8)
    ends = torch.tensor([max(table), min(table), max(table)]).expand(len(near), 3)
    x = torch.cat([near, ends, near.new_zeros(len(near), size_of(text) - 11)], dim=1) * scale
    check(backend, parse(text), x, torch.float32)
    check(backend, parse(text), x.flatten(), torch.bfloat16)


@pytest.mark.parametrize("text", TEXTS)
def test_lengths_around_blocks_and_pieces(backend: Backend, text: str) -> None:
    """Rows one element below, at and above octets, blocks and pieces, of each type, and a long row."""
    for index, numel in enumerate([1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 129, 2047, 2048, 2049, 4097]):
        check(backend, parse(text), torch.randn(2, numel).to(FLOATS[index % 3]), FLOATS[index // 2 % 3])
    check(backend, parse(text), long_row(size_of(text), 70_001), torch.float32)


@pytest.mark.parametrize("text", TEXTS)
def test_zeros_of_both_signs_and_broken_blocks_among_whole_ones(backend: Backend, text: str) -> None:
    """The sign of an extreme zero, and of a decoded NaN, does not depend on its place."""
    x = torch.zeros(3, 700)
    x[:, ::2] = -0.0
    x[1, 300], x[1, 650], x[2, 5] = torch.nan, -torch.inf, -torch.nan
    x[2, 17], x[2, 690:] = torch.inf, 1.0
    for kind in FLOATS:
        check(backend, parse(text), x.to(kind), kind)
    check(backend, parse(text), x[:, :0], torch.float32)


@pytest.mark.parametrize("text", TEXTS)
def test_blocks_far_below_the_largest_of_their_row(backend: Backend, text: str) -> None:
    """Blocks down to 2^-60 of the first, whose scales become coarse or vanish, are coded alike."""
    x = torch.randn(180, 128) * torch.exp2(-torch.arange(180) / 3)[:, None]
    check(backend, parse(text), x.flatten(), torch.float32)


def test_a_mean_is_summed_in_one_order(backend: Backend) -> None:
    """Small values are added by halves, so they do not tip the mean by meeting before the large value."""
    x = torch.zeros(128)
    x[0], x[1], x[[64, 96, 112]] = 1.0, 2.0**-24, 2.0**-54
    check(backend, parse("sign1"), x, torch.float32)
    assert float(encoded(parse("sign1"), x)[16:20].view(torch.float32)) == 1 / 128


@pytest.mark.parametrize("text", TEXTS)
def test_sums_and_carried_errors_are_those_of_torch(backend: Backend, text: str) -> None:
    """Strided rows of several sources are summed alike, also with overflow, and errors are carried alike."""
    codec = parse(text)
    for sources, power in ((1, 1.0), (2, 1e38), (5, 1e-40)):
        values = torch.randn(3, sources, 2100).transpose(0, 1) * power
        frames, wanted = encoded(codec, values), torch.empty(3, 2100)
        got = torch.empty(3, 4200, device=backend.device)[:, ::2]
        reference.decode_sum(codec, frames, wanted)
        backend.kernels.decode_sum(codec, backend.moved(frames), got)
        assert same(got, wanted)
        check_carried(backend, codec, values[0], torch.randn(3, 2100).bfloat16(), 0.8)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS)
def test_no_format_is_left_to_torch(backend: Backend, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """All operations except those with users' own codecs use the kernels, also with carried errors."""
    codec = parse(text)
    for name in ("encode", "decode", "decode_sum"):
        monkeypatch.setattr(own_rows, name, None)
    use_all(backend, codec, carries=True)
    given_by_a_user = replace(codec, instance=codec.definition)
    with pytest.raises(TypeError):
        use_all(backend, given_by_a_user, carries=False)


@pytest.mark.parametrize("text", ["spike2", "spike3", "sign1", "nf4", "bf16sr"])  # each code is a number
@given(seed=st.integers(0, 2**31), numel=st.integers(1, 300))
def test_frames_of_any_bytes_decode_alike(backend: Backend, text: str, seed: int, numel: int) -> None:
    """Corrupt frames, also with spikes beyond their block, decode to the same numbers without an error."""
    codec = parse(text)
    frame = torch.randint(
        256, (codec.frame_bytes(numel),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    wanted, got = torch.empty(numel), torch.empty(numel)
    reference.decode(codec, frame, wanted)
    backend.kernels.decode(codec, frame, got)
    assert same(got, wanted)
