"""``zeropp new``: writes a first suite that compares ZeRO++ with ZeRO-3 and takes minutes on this machine.

The file is made from ``new_suite.template``.  The suite gets a cluster of two nodes that this machine can emulate, and
the largest trials with which the estimated time stays below :data:`WITHIN`.  The file also has commented lines for
other settings that can be compared.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from string import Template
from typing import Final

from harness.errors import Refusal
from harness.expected_time import estimate, spoken
from harness.measure import machine
from harness.runs.feasibility import PROCESS_BYTES, Host, forecast
from harness.suites.suite import LONGEST_NAME, NAME
from harness.suites.suite_file import load
from harness.whole_file import written_whole

WITHIN: Final = 200.0  # seconds that the suite may take by estimate: five minutes, less a margin
_TEMPLATE: Final = Path(__file__).with_name("new_suite.template")
# Sizes of a trial: tokens of each rank in a step, and number of steps.  The first size is taken with which the suite
# takes at most WITHIN seconds.
_SIZES: Final = ((512, 20), (512, 8), (512, 4), (256, 4), (128, 4), (128, 2))
_GPUS: Final = 4  # GPUs that two nodes of two ranks need
_SHARED_MEMORY: Final = 64 << 20  # bytes that transport "shm" needs for such small models


def write(name: str, host: Host) -> tuple[Path, str]:
    """Write the suite file ``<name>.toml`` into the working folder.

    Args:
        name: The suite's name, with or without ``.toml``.
        host: The machine that the suite is for.

    Returns:
        The path of the file, and a sentence on the time that the suite takes, or on why this time is not known.

    Raises:
        Refusal: If a suite cannot have this name.
        FileExistsError: If the file exists.
    """
    name = name.removesuffix(".toml")
    if len(name) > LONGEST_NAME or re.fullmatch(NAME, name) is None:
        form = f"at most {LONGEST_NAME} letters, digits, '_', '-' and '.', and no '.' at the beginning"
        raise Refusal(f"suite name {name!r}: expected {form}")
    path = Path(f"{name}.toml")
    for tokens, steps in _SIZES:
        text = suite_text(name, host, tokens, steps)
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / "suite.toml"
            draft.write_text(text, encoding="utf-8")
            seconds, sentence = estimate(forecast(load(draft).trials, host))
        if seconds is None or seconds <= WITHIN:
            break
    time = "not estimated" if seconds is None else f"about {spoken(seconds)} (estimated)"
    with written_whole([path], new=True) as (unfinished,):
        text = text.replace("\nrepeats =", f'\ntime = "{time}"\nrepeats =', 1)
        unfinished.write_text(text, encoding="utf-8")
    return path, sentence


def suite_text(name: str, host: Host, tokens: int, steps: int) -> str:
    """Return the text of the suite file, for trials on two nodes that ``host`` emulates.

    ``tokens`` is the number of tokens of each rank in a step, ``steps`` the number of steps of a trial.
    """
    template = Template(_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(name=name, tokens=tokens, steps=steps, cluster=_cluster(host))


def _cluster(host: Host) -> str:
    """Return the suite's cluster as TOML: two nodes on this machine.

    - With four GPUs or more, each node has two ranks, each rank has a GPU, and the nodes are network namespaces between
      which NCCL sends through sockets.
    - Otherwise the ranks run on the CPU.  A node has two ranks, or one rank if memory is short.  If this machine cannot
      make network namespaces, the link is ``paced``: ranks delay their own messages to keep to the link's rate.
    """
    gpus = len(host.gpus) >= _GPUS
    ranks = 2 if gpus or host.memory >= 8 * PROCESS_BYTES else 1
    lines = ["nodes = 2", f"ranks_per_node = {ranks}", 'rate = "50 Mbit/s"']
    if gpus:
        lines += [
            'device = "cuda"',
            'transport = "nccl"',
            'link = "namespaces"  # NCCL sends through sockets there',
        ]
    elif why := host.namespaces():
        lines.append(f'link = "paced"  # network namespaces: {" ".join(why.split())}')
    if not gpus and machine.shared_memory_bytes() < _SHARED_MEMORY:
        lines.append('transport = "gloo"  # /dev/shm is too small')
    return "\n".join(lines)
