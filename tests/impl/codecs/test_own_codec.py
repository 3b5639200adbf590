"""A user's codec works in the collectives and in training like built-in ones; a defect is one line."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.codecs.codec import CodecError, parse, user_codec
from impl.codecs.reference import DTYPES, REFERENCE, Carried
from impl.comm.mesh import Mesh
from impl.ops import operations_of
from impl.policy.policy import LossScale, MemoryLimits, PolicyError
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.ranks import each_rank, on_threads
from tests.support.training import model, train


class Claims:
    """A codec that equals a built-in codec, by using the reference, and claims to."""

    codec = "int8:64"
    kinds: ClassVar = ["fp32", "bf16", "fp16"]

    def encode(self, x: Tensor, frame: Tensor) -> None:
        REFERENCE.encode(parse(self.codec), x, frame)

    def decode(self, frame: Tensor, out: Tensor) -> None:
        REFERENCE.decode(parse(self.codec), frame, out)


class Claims4(Claims):
    """The same for gradients."""

    codec = "int4:32"

    def decode_sum(self, frames: Tensor, out: Tensor) -> None:
        REFERENCE.decode_sum(parse(self.codec), frames, out)


class Sixteenths:
    """Rounds fp32 elements to a sixteenth, in int8, saturated at +-7.9375; takes rows of any length."""

    laws: ClassVar = ["zero", "sign", "idempotent"]
    block = 1

    def frame_bytes(self, numel: int) -> int:
        return numel

    def encode(self, x: Tensor, frame: Tensor) -> None:
        frame.view(torch.int8).copy_((x * 16).round().clamp(-127, 127))

    def decode(self, frame: Tensor, out: Tensor) -> None:
        out.copy_(frame.view(torch.int8) / 16)


class OnGpu(Sixteenths):
    device = "cuda"


HERE = __name__
ROOMY = MemoryLimits(max_padding=1.0)
BACKENDS = [operations_of(name) for name in ("reference", "cpu")]


@given(
    shape=st.lists(st.integers(0, 3), max_size=2),
    numel=st.integers(0, 70),
    kind=st.sampled_from(sorted(DTYPES)),
    backend=st.sampled_from(BACKENDS),
    data=st.data(),
)
def test_what_claims_to_be_ours_is(shape: list[int], numel: int, kind: Any, backend: Any, data: Any) -> None:
    """Frames, elements, sums and carried errors of any shape and type equal those of the claimed codec."""
    claiming, claimed = user_codec(Claims4), parse("int4:32")
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(3, *shape, numel).to(DTYPES[kind])
    error = torch.randn(x.shape) if data.draw(st.booleans()) else None
    outputs = []
    for codec in (claiming, claimed):
        frames = torch.full((*x.shape[:-1], codec.frame_bytes(numel)), 7, dtype=torch.uint8)
        carried = None if error is None else Carried(error.clone(), 0.5)
        backend.encode(codec, x, frames, carried=carried)
        out, total = torch.empty_like(x), torch.empty(x.shape[1:])
        backend.decode(codec, frames, out)
        backend.decode_sum(codec, frames, total)
        encoded = torch.empty((*shape, codec.frame_bytes(numel)), dtype=torch.uint8)
        backend.decode_sum_encode(codec, codec, frames, encoded, numel)
        outputs.append([frames, out.float(), total, encoded, *([] if carried is None else [carried.error])])
    for output, wanted in zip(*outputs, strict=True):
        assert torch.equal(output, wanted)


def test_frames_of_any_length_are_padded_with_zeros() -> None:
    """Frames are padded to 16 bytes with zeros, whatever was in memory before."""
    codec, frame = user_codec(Sixteenths()), torch.full((16,), 9, dtype=torch.uint8)
    assert codec.frame_bytes(5) == 16
    REFERENCE.encode(codec, torch.ones(5, dtype=torch.bfloat16), frame)
    assert frame.tolist() == [16] * 5 + [0] * 11
    out = torch.empty(5, dtype=torch.float16)
    REFERENCE.decode(codec, frame, out)
    assert out.tolist() == [1.0] * 5


class Greedy(Sixteenths):
    def encode(self, x: torch.Tensor, frame: torch.Tensor) -> None:
        x.data.mul_(2)
        super().encode(x, frame)

    def decode(self, frame: torch.Tensor, out: torch.Tensor) -> None:
        frame.numpy()[...] += 1
        super().decode(frame, out)


def test_what_is_given_to_read_is_not_written() -> None:
    """A user's codec reads copies of master shards and of other ranks' messages."""
    codec, frames, x = user_codec(Greedy), torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 16)
    REFERENCE.encode(codec, x, frames)
    assert torch.equal(x, torch.ones(2, 16))
    sent, out = frames.clone(), torch.empty(2, 16)
    REFERENCE.decode(codec, frames, out)
    REFERENCE.decode_sum(codec, frames, out[0])
    assert torch.equal(frames, sent)


def test_training_is_that_of_the_claimed_codecs() -> None:
    """Losses and weights are bit-equal, with users' codecs for weights and both hops of gradients, and hpZ."""
    changes = {"weights": parse("int8:64"), "gradients": (parse("int4:32"),) * 2}
    claims = {"weights": parse(f"{HERE}:Claims"), "gradients": (parse(f"{HERE}:Claims4"),) * 2}
    topology = Topology(2, 2)
    wanted = on_threads(topology, train, model(), preset("zeropp", memory=ROOMY, **changes), 3)
    trained = on_threads(topology, train, model(), preset("zeropp", memory=ROOMY, **claims), 3)
    assert trained[0][0] == wanted[0][0]
    for name, value in wanted[0][1].items():
        assert torch.equal(trained[0][1][name], value)


def test_a_new_codec_trains() -> None:
    """A codec without blocks, scales or a bound carries weights; losses are close to those without it."""
    topology = Topology(2, 2)
    wanted = on_threads(topology, train, model(), preset("zero3"), 3)
    trained = on_threads(topology, train, model(), preset("zero3", weights=user_codec(Sixteenths)), 3)
    assert trained[0][0] != wanted[0][0]
    assert trained[0][0] == pytest.approx(wanted[0][0], abs=0.02)


@each_rank(1, 2)
def test_codecs_that_cannot_be_used_are_refused(mesh: Mesh) -> None:
    """A codec for another device, one that hides overflows from a loss scale, and objects that are no codecs."""
    with pytest.raises(ValueError, match="OnGpu supports only cuda, but the tensors are on cpu"):
        shard(model(), mesh=mesh, policy=preset("zero3", weights=user_codec(OnGpu)))
    codec, scale = user_codec(Sixteenths), LossScale(initial=8.0)
    scaled = preset("zero3", compute="fp16", loss_scale=scale, weights=codec)
    with pytest.raises(PolicyError, match="Sixteenths does not promise the law 'nonfinite'"):
        scaled.check(Topology(1, 2))
    for text, message in (
        ("no_such_module:Codec", "cannot import 'no_such_module'"),
        (f"{HERE}:Missing", "has no 'Missing'"),
        (f"{HERE}:torch", "has no method 'encode'"),
    ):
        codec = parse(text)
        assert str(codec) == text
        with pytest.raises(CodecError, match=message):
            _ = codec.grain
    with pytest.raises(CodecError, match="has no method 'encode'"):
        user_codec(object())
