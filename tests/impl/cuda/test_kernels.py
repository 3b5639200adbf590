"""The CUDA kernels, on the host and with ``-m gpu`` on a device, equal the reference bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from impl.codecs.codec import parse
from impl.codecs.rounding_noise import Key
from impl.cuda.kernels import Kernels
from impl.cuda.launch import Launch
from tests.impl.codecs.properties import *  # noqa: F403  # the tests of every backend
from tests.impl.codecs.properties import Backend, use_all, without_reference
from tests.impl.cuda.conftest import Device
from tests.support.cubin import VARIANTS

DEMANDED = [
    *(
        f"int{bits}:{block}{asym}"
        for bits in range(2, 9)
        for block in (1, 256, "shard")
        for asym in ("", ":asym")
    ),
    *(f"fp8{element}:{block}" for element in ("e4m3", "e5m2") for block in (7, 128, "shard")),
    *("mxfp8", "mxfp8e5m2", "mxfp4"),
]


def test_every_codec_with_scales_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation on a codec with scales is left to the reference, whatever its rounding and rotation, and
    whether it carries errors.
    """
    without_reference(monkeypatch)
    launches: list[Launch] = []
    noting = Kernels(lambda launch, _: launches.append(launch))
    backend = Backend(noting, Device(), torch.device("cpu"))
    for text in DEMANDED:
        turned = [f"{text}:hadamard32:stochastic"] if text.split(":")[1:2] not in (["1"], ["7"]) else []
        for variant, carries in itertools.product([text, f"{text}:stochastic", *turned], [False, True]):
            launches.clear()
            use_all(backend, parse(variant), carries=carries)
            assert len(launches) >= 4
    launches.clear()
    noting.decode(parse("bf16"), torch.zeros(512, dtype=torch.uint8), torch.zeros(256))
    assert not launches  # a cast


def nothing(launch: Launch, device: torch.device) -> None:
    raise AssertionError(launch)


def test_what_a_kernel_cannot_do_is_refused() -> None:
    """Impossible strides and shapes raise one line, with the numbers; ``tests/impl/cpu`` has what all
    backends refuse alike.
    """
    kernels, codec = Kernels(nothing), parse("int8:8")
    many = torch.zeros(2, 2, 2, 2, 2, 2, 2, 2, 32).permute(1, 0, 3, 2, 5, 4, 7, 6, 8)
    with pytest.raises(ValueError, match="the CUDA kernels take 3"):
        kernels.encode(codec, many, torch.zeros(*many.shape[:-1], 48, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 x 65536 rows: a grid holds 65535"):
        kernels.encode(
            codec,
            torch.zeros(1).expand(65_536, 32),
            torch.zeros(1, dtype=torch.uint8).expand(65_536, 48).clone(),
        )
    rows = torch.zeros(1).expand(2**31)
    with pytest.raises(ValueError, match="2147483648 elements a row: the CUDA kernels take 2147483647"):
        kernels.encode(codec, rows, torch.empty(codec.frame_bytes(2**31), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"and noise with \(8, 24, 8, 72\): the CUDA kernels take 3"):
        kernels.encode(
            parse("int8:8:stochastic"),
            torch.zeros(2, 2, 2, 2, 32),
            torch.zeros(2, 2, 2, 2, 48, dtype=torch.uint8),
            noise=Key(0, 0, 0, "", "weights").noise(0, (8, 24, 8, 72)),
        )


def test_only_listed_kernels_are_asked_for(backend: Backend) -> None:
    """What ran in this session stands in the list that the compile gate compiles."""
    assert set(backend.run.ran) <= {kernel for kernels in VARIANTS.values() for kernel in kernels}
