"""Writes a first suite: one contrast that ends in minutes here, with all further axes as comments."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Final

from harness.errors import Refusal
from harness.expected_time import Expected, expected, spoken
from harness.measure import machine
from harness.runs.feasibility import PROCESS_BYTES, Host, forecast
from harness.suites.suite_file import LONGEST_NAME, NAME, load

WITHIN: Final = 200.0  # seconds that it may be expected to take: five minutes, with a margin
_SIZES: Final = ((512, 20), (512, 8), (512, 4), (256, 4), (128, 4), (128, 2))  # tokens of a rank, steps
_GPUS: Final = 4  # two nodes of two ranks
_SHARED_MEMORY: Final = 64 << 20  # of a node, through which its ranks exchange


def write(name: str, host: Host) -> tuple[Path, Expected | str]:
    """Write ``<name>.toml`` into the working folder; returns its path, and the time that it should take.

    A Refusal for a name that a suite cannot have, and where the file is there already.
    """
    name = name.removesuffix(".toml")
    if len(name) > LONGEST_NAME or re.fullmatch(NAME, name) is None:
        raise Refusal(
            f"{name!r}: expected at most {LONGEST_NAME} letters, digits, '_', '-' and '.', which is not the "
            "first"
        )
    path = Path(f"{name}.toml")
    if path.exists():
        raise Refusal(f"{path}: is there already; choose another name")
    for tokens, steps in _SIZES:
        written = suite_text(name, host, tokens, steps)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "suite.toml"
            file.write_text(written, encoding="utf-8")
            found = expected(forecast(load(file).trials, host))
        if isinstance(found, str) or found.seconds <= WITHIN:
            break
    time = found if isinstance(found, str) else f"about {spoken(found.seconds)} (estimated)"
    written = written.replace("\nrepeats =", f'\ntime = "{time}"\nrepeats =', 1)
    with path.open("x", encoding="utf-8") as whole:
        whole.write(written)
    return path, found


def suite_text(name: str, host: Host, tokens: int, steps: int) -> str:
    """The file's text: ZeRO++ beside ZeRO-3 on the cluster that ``host`` has."""
    return f"""\
# zeropp plan {name}.toml says what it will send and hold, and how long it takes.
# zeropp run {name}.toml runs it; the report is then at results/{name}/report.html.
name = "{name}"
question = "How much faster is a step of ZeRO++ than one of ZeRO-3 between two nodes at 50 Mbit/s?"
repeats = 6  # an interval takes six; "until 2 %" goes on until it is as narrow

[defaults]
model.name = "gpt-small"
sequence = 128
tokens_per_rank = {tokens}
steps = {steps}
warmup = 1
# validate_every = 0  # takes the loss on data that is not trained on, after the last step
# measure_quantisation = true  # measures errors of what is sent

[defaults.cluster]
{_cluster(host)}

# What is compared: the first is the baseline.  Also ddp, zero1, zero2, qwz, hpz, qgz, ...
[matrix]
strategy = ["zero3", "zeropp"]

# Each line asks a further question; take its # away.  Several multiply: fewer at a time are easier to read.
# A codec or an hpZ group changes only strategies that have one; zeropp plan says whom it is left out of.
# Every key is in docs/guide/suites.md.
# policy.weights = ["int8:2048", "int6:2048", "int4:2048"]  # 2 to 8 bits, any block: how few will do?
# policy.gradients = ["int8:256", "int4:256:clip"]  # likewise, or a list of two hops: how few will do?
# policy.feedback = ["none", "loco"]  # does carrying errors over help?
# policy.sums = ["fp32", "fp16"]  # as DeepSpeed: what do sums in fp16 cost?
# policy.blocks = ["codec", "shape"]  # as DeepSpeed: what do blocks by shape bring?
# policy.budget = ["none", "gradients every 2 of int3:256 int8:256"]  # codecs chosen by unit: do they pay?
# policy.secondary = [2, 4]  # ranks that share hpZ's copy: how many?
# policy.secondary_format = ["frames", "bf16"]  # does the copy need 16 bits?
# policy.reduce = ["one_hop", "two_hop"]  # or ring: which way for gradients?
# policy.chunks = [1, 4]  # 1 to 8: do two hops overlap?
# policy.reduce_every = ["micro_batch", "step"]  # with accumulation = 4: reduce late?
# policy.compute = ["fp32", "bf16"]  # or fp16: what do gathered weights cost?
# policy.prefetch = [0, 1000000]  # elements gathered ahead: do gathers hide?
# policy.max_live = [1000000, 100000000]  # elements gathered at once: what does a limit cost?
# policy.max_reuse = [0, 100000000]  # keep units until backward?
# policy.persist_below = [0, 100000]  # keep small parameters gathered?
# policy.reduce_bucket = [100000, 500000000]  # elements of gradients under way: what does a limit cost?
# policy.offload_optimizer = [0.0, 1.0]  # share on the host, 0 to 1: what does it cost?
# policy.offload_weights = [0.0, 1.0]  # likewise, of weights
# cluster.nodes = [2, 3]  # 1 or more: from how many on does it pay?
# cluster.ranks_per_node = [1, 2]  # 1 to 64: does it need ranks that share a node?
# cluster.rate = ["20 Mbit/s", "50 Mbit/s", "200 Mbit/s"]  # any rate: up to which does it pay?
# cluster.latency = ["0.1 ms", "5 ms"]  # one way: do more hops cost more?
# cluster.transport = ["shm", "gloo"]  # what does shared memory bring?
# model.name = ["gpt-small", "bert-small"]  # a preset, or module:function: does it depend on the model?
# sequence = [64, 128]  # tokens: does it depend on their length?
# tokens_per_rank = [256, 512, 1024]  # multiples of sequence: from which batch on does it not pay?
# accumulation = [1, 4]  # micro-batches of a step, 1 or more: does it pay with fewer reductions?
# activation_checkpointing = [false, true]  # what does recomputing cost?
# clip = [1.0, 10.0]  # norm, above 0: what does clipping cost?
# optimizer.name = ["AdamW", "Adamax"]  # of torch.optim, or module:class: does it depend on it?
# optimizer.arguments.lr = [3e-4, 1e-3]  # below 1000: does it depend on the rate?
# optimizer.schedule.decay = ["none", "cosine"]  # or linear: does it depend on the schedule?
# seed = [0, 1, 2, 3, 4, 5]  # losses: six seeds, steps = 100 and validate_every = 0 give a verdict
# threads = [1, 2]  # of each rank: do more help?
# memory_limit = ["16 MiB", "1 GiB"]  # of a rank's states: who keeps within it?
"""


def _cluster(host: Host) -> str:
    """Two nodes of what the machine has: GPUs for four ranks, or processors; a shaped or a paced link."""
    gpus = len(host.gpus) >= _GPUS
    ranks = 2 if gpus or host.memory >= 8 * PROCESS_BYTES else 1
    lines = ["nodes = 2", f"ranks_per_node = {ranks}", 'rate = "50 Mbit/s"']
    if gpus:
        lines += ['device = "cuda"', 'transport = "nccl"', 'link = "paced"  # the kernel does not shape NCCL']
    elif why := host.namespaces():
        lines.append(f'link = "paced"  # network namespaces: {" ".join(why.split())}')
    if not gpus and machine.shared_memory_bytes() < _SHARED_MEMORY:
        lines.append('transport = "gloo"  # /dev/shm is too small')
    return "\n".join(lines)
