"""The recomputed step of Muon is that of torch."""

from __future__ import annotations

import torch

from harness.reference_checks.muon_step import muon_step
from impl.codecs.codec import BF16, parse
from tests.harness.runs.test_muon import muon


def test_a_step_taken_again_is_torchs() -> None:
    """The step that a trial is checked against equals torch.optim.Muon to the bit, and a coarse codec changes it."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 64), (64, 24)):
        value, momentum, gradient = (torch.randn(shape, generator=generator) for _ in range(3))
        parameter = torch.nn.Parameter(value.clone())
        optimizer = torch.optim.Muon([parameter], lr=0.02)
        optimizer.state[parameter]["momentum_buffer"] = momentum.clone()
        parameter.grad = gradient.clone()
        optimizer.step()
        places = [(0, 512), (512, 24 * 64)]
        step, rate = muon_step(muon("zero3"), 0, value, momentum, gradient, (BF16, BF16), places)
        assert (step - parameter.detach()).abs().max() <= 2.0**-22 * value.abs().max()
        coarse = (parse("int4:64"), parse("int4:64"))
        other, _ = muon_step(muon("zero3"), 0, value, momentum, gradient, coarse, places)
        assert 0 < float((other - step).abs().max()) < 2 * rate
