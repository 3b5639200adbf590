"""The CUDA kernels of published formats, on the host and with ``-m gpu`` on a device, equal torch's bits."""

from __future__ import annotations

import pytest
import torch

from impl.codecs.codec import FORMATS, parse
from tests.impl.codecs.properties import Backend, garbage, noise_of
from tests.impl.cpu.test_formats import (  # noqa: F401  # tests that run here too
    test_a_mean_is_summed_in_one_order,
    test_blocks_far_below_the_largest_of_their_row,
    test_hostile_rows_are_coded_as_by_torch,
    test_lengths_around_blocks_and_pieces,
    test_no_format_is_left_to_torch,
    test_numbers_beside_every_tie_are_coded_as_by_torch,
    test_sums_and_carried_errors_are_those_of_torch,
    test_zeros_of_both_signs_and_broken_blocks_among_whole_ones,
)


@pytest.mark.parametrize("order", [1, 7])
@pytest.mark.parametrize("text", FORMATS)
def test_the_order_of_threads_changes_no_byte(backend: Backend, text: str, order: int) -> None:
    """Frames and sums are the same whichever thread and thread block runs first."""
    codec, x = parse(text), torch.randn(3, 5003, device=backend.device)
    outputs = []
    for run_order in (0, order):
        backend.run.order = run_order
        frames, out = garbage(codec, x.shape, x.device), torch.empty(5003, device=backend.device)
        backend.kernels.encode(codec, x, frames, noise=noise_of(codec, x.shape[:-1]))
        backend.kernels.decode_sum(codec, frames, out)
        outputs.append((frames, out))
    backend.run.order = 0
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
