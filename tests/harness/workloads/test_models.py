"""The models, and the arithmetic of a step of them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.errors import Refusal
from harness.suites.model_sizes import IMAGE_SIDE, PATCHES, PRESETS, GPTShape, step_flops
from harness.suites.trial import Model, Trial
from harness.workloads.generation import decode
from harness.workloads.models import GPT, build, of_trial, with_values
from harness.workloads.preset_parameters import shape_of
from harness.workloads.rank_batches import RankBatches

LOG = Path(__file__).resolve().parents[3] / "report" / "published" / "zeropp_tutorial_log.csv"


def batch(sequence: int, vocab: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocab, (2, sequence + 1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "vit-tiny"])
def test_a_loss_is_formed_in_fp32(name: str) -> None:
    """A model in bf16 gives the loss of its logits in fp32: 16 bits would round it to 1/32 near 5."""
    net = build(Model(name=name), 16).to(torch.bfloat16)
    seen: list[torch.Tensor] = []
    net.head.register_forward_hook(lambda _, __, logits: seen.append(logits))
    inputs, targets = batch(16)
    if name.startswith("vit"):
        inputs, targets = torch.rand(4, IMAGE_SIDE, IMAGE_SIDE), torch.arange(4)
    loss = net(inputs, targets)
    (logits,) = seen
    assert logits.dtype == torch.bfloat16
    wanted = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
    assert loss.dtype == torch.float32
    assert torch.equal(loss, wanted)


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "vit-tiny"])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_formula_counts_what_runs(name: str, layers: int) -> None:
    """FLOPs by formula are exactly those that torch counts in a forward and a backward pass."""
    images = {"corpus": "glyphs", "sequence": 16} if name == "vit-tiny" else {"sequence": 24}
    model_fields = {"name": name, "arguments": {"layers": layers, "width": 32}}
    trial = Trial.model_validate({"model": model_fields, "tokens_per_rank": 48, **images})
    model = build(trial.model, trial.sequence)
    ((batch,),) = RankBatches(trial, 0, torch.device("cpu")).step(0)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*batch).backward()
    sizes = {"sequences": 48 // trial.sequence, "length": trial.sequence}
    assert counter.get_total_flops() == step_flops(shape_of(trial.model), **sizes, recompute=False)


@pytest.mark.parametrize(("name", "sees"), [("gpt-tiny", False), ("bert-tiny", True)])
def test_an_encoder_alone_sees_later_tokens(name: str, sees: bool) -> None:
    """In a BERT an earlier answer depends on a later token, in a GPT it does not."""
    torch.manual_seed(0)
    model = build(Model(name=name), 8)
    tokens = torch.randint(0, 256, (1, 8))
    changed, targets = tokens.clone(), torch.full((1, 8), -100)
    changed[0, 6] = (changed[0, 6] + 1) % 256
    targets[0, 1] = 65
    assert torch.equal(model(tokens, targets), model(changed, targets)) != sees


def test_an_image_is_cut_into_its_patches() -> None:
    """A vision model reads every pixel once: patch by patch, row by row."""
    model = build(Model(name="vit-tiny"), 16)
    side = PATCHES[16]
    image = torch.arange(32.0 * 32).view(1, 32, 32)
    seen = []
    model.embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[union-attr]
    model(image, torch.tensor([0]))
    (patches,) = seen
    assert patches.shape == (1, 16, side * side)
    for number in range(16):
        row, column = divmod(number, 4)
        expected = image[0, row * side : (row + 1) * side, column * side : (column + 1) * side]
        assert torch.equal(patches[0, number], expected.flatten())


@settings(max_examples=20)
@given(
    prompt=st.integers(1, 6),
    tokens=st.integers(1, 6),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2]),
)
def test_decoding_remembers(prompt: int, tokens: int, layers: int, heads: int) -> None:
    """Tokens decoded with kept keys and values are those of reading everything anew for each."""
    torch.manual_seed(prompt * 100 + tokens)
    model = GPT(GPTShape(layers, 16, heads), prompt + tokens).eval()
    prompts = torch.randint(0, 256, (3, prompt))
    decoded = torch.stack(list(decode(model, prompts, tokens, layers)), 1)
    text = prompts
    with torch.no_grad():
        for _ in range(tokens):
            text = torch.cat([text, model(text, None).argmax(-1)[:, None]], 1)
    assert torch.equal(decoded, text[:, prompt:])


@pytest.mark.parametrize(("name", "billions"), [("gpt-18b", 18.4), ("gpt-100b", 101.2)])
def test_models_too_big_for_here_build_on_meta(name: str, billions: float) -> None:
    """The large presets have their parameters without their memory."""
    with torch.device("meta"):
        model = build(Model(name=name), 512)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def custom(sequence: int, width: int = 4) -> nn.Module:
    """A user's own model."""
    return GPT(GPTShape(1, width, 1), sequence)


def not_a_model(sequence: int) -> int:
    return sequence


def test_a_users_function_builds_the_model() -> None:
    """``module:function`` is called with the sequence and the arguments."""
    model = build(Model(name=f"{__name__}:custom", arguments={"width": 8}), 16)
    assert isinstance(model, GPT)
    assert model.positions.weight.shape == (16, 8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(arguments={"widht": 3}), "did you mean 'width'"),
        (Model(arguments={"width": 0}), "width = 0"),
        (Model(arguments={"tied": 1}), "true or false"),
        (Model(arguments={"width": 257}), "a width of 257 is not divisible by 4 heads"),
        (Model(name="no_such_module:f"), "cannot import 'no_such_module'"),
        (Model(name=f"{__name__}:nothing"), "has no 'nothing'"),
        (Model(name=f"{__name__}:not_a_model"), "expected an nn.Module"),
        (Model(name="vit-tiny", arguments={"classes": 5}), "unknown argument 'classes'"),
    ],
)
def test_a_model_that_cannot_be_built_is_named(model: Model, message: str) -> None:
    """Bad names and sizes raise one line that says what is wrong."""
    with pytest.raises(Refusal, match=message) as caught:
        build(model, 16)
    assert "\n" not in str(caught.value)


def test_a_preset_of_an_old_record_is_named_where_it_is_built() -> None:
    """A record may name one that went: it is read, and refused where its sizes are asked for."""
    fields = Trial().canonical()
    old = Trial.from_canonical(fields | {"model": fields["model"] | {"name": "gpt-old"}}).model
    assert old.name == "gpt-old"
    with pytest.raises(Refusal, match="'gpt-old': expected one of gpt-tiny"):
        build(old, 16)


def test_published_teraflops_follow_from_their_shapes() -> None:
    """The formula gives the tutorial log's TFLOPs per GPU to its two digits."""
    rows = list(csv.DictReader(LOG.read_text().splitlines()))
    assert [row["tflops_per_gpu"] for row in rows] == ["7.24", "7.65", "10.70", "20.70"]
    for row in rows:
        shape = PRESETS["gpt-18b"]
        assert (shape.layers, shape.width) == (int(row["layers"]), int(row["hidden"]))
        sizes = {"sequences": int(row["global_batch"]), "length": int(row["seq_length"])}
        flops = step_flops(shape, **sizes, recompute=True) / int(row["gpus"])
        assert f"{flops / float(row['ms_per_iteration']) / 1e9:.2f}" == row["tflops_per_gpu"]


def test_patches_that_make_no_image_are_refused() -> None:
    """A vision model whose sequence is no square of equal patches is refused, naming those that are."""
    with pytest.raises(
        Refusal,
        match=r"cannot cut an image into 128 square patches; set sequence to one of 1, 4, 16, 64, 256, 1024",
    ):
        build(Model(name="vit-tiny"), 128)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_given_values_is_the_model_itself(tied: bool) -> None:
    """Built with another model's weights, a model has that model's loss and gradients; tied weights stay tied, and
    nothing is drawn.
    """
    arguments = {"layers": 1, "width": 32, "heads": 2, "tied": tied}
    trial = Trial(
        strategy="zero3", model=Model(name="gpt-tiny", arguments=arguments), sequence=16, tokens_per_rank=32,
        activation_checkpointing=True,
    )  # fmt: skip
    model, tokens = of_trial(trial), torch.arange(32).view(2, 16)
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    before = torch.get_rng_state()
    again = with_values(trial, values)
    assert torch.equal(before, torch.get_rng_state())
    assert (again.head.weight is again.embedding.weight) == tied
    losses = [each(tokens, tokens.flip(1)) for each in (model, again)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    grads = [{name: p.grad for name, p in each.named_parameters()} for each in (model, again)]
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
