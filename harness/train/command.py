"""``zeropp train``: the flags of the tutorials' launch lines.  torch is imported when it runs."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from harness.cluster import interrupts
from harness.cluster.rank import Progress
from harness.errors import Refusal
from harness.measure import machine
from harness.runs.forecast import this_host
from harness.suites.model_sizes import PRESETS, GPTShape
from impl.checkpoint.manifest import Manifest, read_manifest, resolve
from impl.deepspeed.config_file import DeepSpeedError, load
from impl.deepspeed.recipe import Recipe, laid_out
from impl.plan.topology import Topology

if TYPE_CHECKING:
    from harness.train.loop import Asked, Job

LONGEST_SECONDS: Final = 7 * 86400.0
DEFAULT: Final = GPTShape(layers=4, width=256, heads=4)
MOST_LAYERS: Final = 10_000  # each takes time to be laid out
MOST: Final = 1_000_000_000  # steps, sequences of a rank, tokens of a sequence
MOST_PARAMETERS: Final = 1e15
_LENGTHS: Final = {"1.5b": 1024, "10b": 1024, "18b": 512}
_ONE: Final = "only 1: there is no tensor, model or pipeline parallelism here"


class TrainError(Exception):
    """What ``zeropp train`` is asked cannot be done; one line."""


def train(
    *,
    preset: Annotated[
        Literal["1.5b", "10b", "18b"] | None, typer.Option(help="Shape of a tutorial's model.")
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, max=MOST_LAYERS, help="Transformer blocks.")
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, help="Width.")] = None,
    num_attention_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads; they divide the width.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=256, help="Rows of the embedding; data are bytes.")
    ] = None,
    seq_length: Annotated[int | None, typer.Option(min=1, max=MOST, help="Tokens of a sequence.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Sequences of a rank in a micro-batch.")
    ] = None,
    checkpoint_activations: Annotated[
        bool,
        typer.Option(
            "--checkpoint-activations",
            "--deepspeed-activation-checkpointing",
            help="Run blocks again in the backward pass instead of keeping their activations.",
        ),
    ] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Compute in fp16, with a loss scale.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bf16.")] = False,
    zero_stage: Annotated[int | None, typer.Option(min=0, max=3, help="Of ZeRO.")] = None,
    deepspeed_config: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed_config", "--deepspeed-config", help="File in JSON; see docs/guide/deepspeed.md."
        ),
    ] = None,
    model_parallel_size: Annotated[int, typer.Option(help="Only 1.")] = 1,
    tensor_model_parallel_size: Annotated[int, typer.Option(help="Only 1.")] = 1,
    pipeline_model_parallel_size: Annotated[int, typer.Option(help="Only 1.")] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="Virtual nodes; under torchrun, its own.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, max=64, help="Ranks of each node.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where states and models lie.")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, max=MOST, help="Optimizer steps.")] = 10,
    lr: Annotated[
        float | None,
        typer.Option(min=0, help="Learning rate; 3e-4 where the configuration does not say one either."),
    ] = None,
    corpus: Annotated[str, typer.Option(help="stdlib, a file or a folder.")] = "stdlib",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and batches.")] = 0,
    max_padding: Annotated[
        float | None,
        typer.Option(min=0, help="Share of a unit's elements that may be padding; 0.2 if not given."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Folder of checkpoints: one after the last step.")] = None,
    save_every: Annotated[
        int | None,
        typer.Option("--save-every", "--save-interval", min=1, help="And one every so many steps."),
    ] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Checkpoints to keep, the newest.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--load", help="A checkpoint, or a folder of them, to go on from.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the memory at each stage, and stop.")] = False,
) -> None:
    """Train a GPT by a DeepSpeed configuration, with the flags of its tutorials; print a line a step."""
    from harness.train.loop import Asked, Checkpoints, job_of

    for flag, size in (
        ("--model-parallel-size", model_parallel_size),
        ("--tensor-model-parallel-size", tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", pipeline_model_parallel_size),
    ):
        if size != 1:
            raise TrainError(f"{flag} {size}: {_ONE}")
    if save is None and (save_every or keep):
        raise TrainError(f"{'--save-every' if save_every else '--keep'}: where to? give --save FOLDER")
    if fp16 and bf16:
        raise TrainError("--fp16 and --bf16: expected at most one of them")
    topology, torchrun = _topology(nodes, ranks_per_node)
    shape = _shape(preset, num_layers, hidden_size, num_attention_heads, vocab_size)
    if save is not None:
        _check_writable(save)
    if resume is not None:
        read_manifest(resolve(resume))
    asked = Asked(
        shape=shape,
        sequence=seq_length or _LENGTHS.get(preset or "", 128),
        batch=batch_size,
        recompute=checkpoint_activations,
        precision="fp16" if fp16 else "bf16" if bf16 else None,
        stage=zero_stage,
        lr=lr,
        steps=steps,
        corpus=corpus,
        seed=seed,
        max_padding=max_padding,
        topology=topology,
        device=device,
        torchrun=torchrun,
        threads=max(1, machine.cores() // topology.world),
        checkpoints=Checkpoints(load=resume, save=save, every=save_every, keep=keep),
    )
    try:
        configuration = {} if deepspeed_config is None else load(deepspeed_config)
    except DeepSpeedError as error:  # names the file
        raise TrainError(str(error)) from None
    try:
        job, found = job_of(configuration, asked)
    except (Refusal, ValueError) as error:
        raise TrainError(f"{deepspeed_config or 'flags'}: {error}") from None
    speaks = not torchrun or os.environ.get("RANK", "0") == "0"
    problem = _refused(job, found, asked, speaks=speaks)
    if problem and not plan:
        raise TrainError(f"too big for memory: {problem}; the table says what other stages need")
    if not plan:
        _run(job, asked)


def told_steps(manifest: Manifest) -> str:
    """How far a checkpoint's run was, counted as its log counts: a step that an overflow skipped is one.

    The loss scale counts them only while its setting stays; `zeropp train` saves what its log said.
    """
    scale, extra = manifest.loss_scale, manifest.extra
    done = manifest.step + (0 if scale is None else scale.skipped)
    if isinstance(extra, dict) and extra.keys() == {"seed", "corpus", "sequence", "steps"}:
        done = int(extra["steps"])
    skipped = done - manifest.step
    if not skipped:
        return f"step {done}"
    return f"step {done}, of which {skipped} {'was' if skipped == 1 else 'were'} skipped for an overflow"


def _topology(nodes: int | None, ranks_per_node: int | None) -> tuple[Topology, bool]:
    """Where ranks stand, and whether torchrun has started them.

    Raises:
        TrainError: for other numbers than torchrun's.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # as torch.distributed.is_torchelastic_launched()
        return Topology(nodes or 1, ranks_per_node or 2), False
    world = _torchrun("WORLD_SIZE")
    each = ranks_per_node or (max(1, world // nodes) if nodes else _torchrun("LOCAL_WORLD_SIZE"))
    topology = Topology(nodes or max(1, world // each), each)
    if topology.world != world:
        raise TrainError(f"torchrun started {world} ranks, --nodes x --ranks-per-node are {topology}")
    return topology, True


def _torchrun(name: str) -> int:
    """A count that torchrun leaves in the environment.

    Raises:
        TrainError: if it is not there, or none.
    """
    said = os.environ.get(name, "")
    if not said.isdecimal() or not int(said):
        raise TrainError(f"{name} = {said!r}: under torchrun (TORCHELASTIC_RUN_ID is set) expected a count")
    return int(said)


def _check_writable(folder: Path) -> None:
    """Refuse a folder that checkpoints cannot be written into, before any time is spent on training.

    Raises:
        TrainError: naming what is in the way.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise TrainError(f"--save {folder}: not writable: {place}: {error.strerror}") from None


def _shape(
    preset: str | None, layers: int | None, width: int | None, heads: int | None, vocab: int | None
) -> GPTShape:
    """The preset's shape, or a small one, with what the flags change.

    Raises:
        TrainError: if heads do not divide the width, or for more parameters than any machine lays out.
    """
    base = DEFAULT if preset is None else PRESETS[f"gpt-{preset}"]
    assert isinstance(base, GPTShape)  # noqa: S101  # all of these names are
    shape = replace(
        base,
        layers=layers or base.layers,
        width=width or base.width,
        heads=heads or base.heads,
        vocab=vocab or base.vocab,
    )
    if shape.width % shape.heads:
        raise TrainError(f"--hidden-size {shape.width}: {shape.heads} heads do not divide it")
    if (numel := 12 * shape.layers * shape.width**2 + shape.vocab * shape.width) > MOST_PARAMETERS:
        raise TrainError(f"{shape}: some {numel:.1e} parameters, expected at most {MOST_PARAMETERS:.0e}")
    return shape


def _print(found: Recipe) -> None:
    for finding in found.findings:
        print(finding)


def _refused(job: Job, recipe: Recipe, asked: Asked, *, speaks: bool) -> str | None:
    """Print what became of each key and what each stage needs; why it does not fit, if it does not.

    Raises:
        TrainError: if the model cannot be laid out.
    """
    from harness.train.memory_table import GB, activation_bytes, needs, table, too_large
    from harness.workloads import models
    from impl.engine.unit_planning import plan_units
    from impl.errors import ZeroError
    from impl.plan.geometry import PaddingError

    trial, policy = job.trial, recipe.policy
    with models.unfilled():
        model = models.GPT(job.shape, trial.sequence)
    held = activation_bytes(
        job.shape, policy, sequences=trial.tokens_per_rank // trial.sequence, length=trial.sequence,
        recompute=job.recompute,
    )  # fmt: skip
    try:
        recipe = laid_out(recipe, plan_units(model, asked.topology, policy))
        found = needs(model, policy, asked.topology, micro_batches=trial.accumulation, activations=held)
    except (ValueError, ZeroError) as error:
        if speaks:
            _print(recipe)
        option = f": --max-padding {error.needed:.2f}" if isinstance(error, PaddingError) else ""
        raise TrainError(f"{error}{option}") from None
    if speaks:
        _print(recipe)
        numel = sum(parameter.numel() for parameter in model.parameters())
        whole, share = found[0].adam, found[1].adam
        print(
            f"{numel / 1e9:.4g} B parameters on {asked.topology.world} ranks ({asked.topology}): Adam's "
            f"states are {whole / GB:.4g} GB, and {share / GB:.4g} GB on each rank from stage 1 on"
        )
        print(table(found, policy.stage, cuda=asked.device == "cuda"), flush=True)
    here = asked.topology.world if not asked.torchrun else _torchrun("LOCAL_WORLD_SIZE")
    return too_large(found[policy.stage], asked.topology, this_host(), cuda=asked.device == "cuda", here=here)


def _run(job: Job, asked: Asked) -> None:
    """Start the ranks, or be one, and print what rank 0 says.

    Raises:
        TrainError: if a rank could not do what it was asked.
    """
    from harness.cluster.link import Setting, open_link
    from harness.cluster.processes import REFUSALS, Launch, LaunchError, run_in_place, run_ranks
    from harness.train.loop import train as train_rank
    from impl.checkpoint.save_load import CheckpointError
    from impl.engine.loss_scaler import LossScaleError
    from impl.errors import ZeroError

    def say(progress: Progress) -> None:
        print(progress.text, flush=True)

    interrupts.take_over()
    setting = Setting("real" if asked.torchrun else "none", asked.topology.nodes, None)
    with open_link(setting, f"{os.getpid():x}"[-6:]) as link:
        launch = Launch(
            topology=asked.topology,
            ports=link.ports,
            paced_mbit=None,
            threads=asked.threads,
            timeout_seconds=LONGEST_SECONDS,
            log=Path(tempfile.gettempdir()) / f"zeropp-train-{os.getpid()}.log",
            backend="cpu:gloo,cuda:nccl" if asked.device == "cuda" else "gloo",
        )
        start: Any = run_in_place if asked.torchrun else run_ranks
        try:
            start(train_rank, job, launch, say)
        except LaunchError as error:
            raise TrainError(f"{error} (log: {error.log})") from None
        except (*REFUSALS, CheckpointError, LossScaleError, ZeroError) as error:
            raise TrainError(str(error)) from None
