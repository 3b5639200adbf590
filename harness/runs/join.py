"""``python -m harness.runs.join HOST PORT NODE NODES PREFIX``: the supervisor of one node of a run.

What launcher ``hosts`` starts on every host but the first.
"""

from __future__ import annotations

import sys

from harness.cluster.control import Place
from harness.cluster.node_supervisors import follow
from harness.errors import Refusal, one_line
from harness.measure import run_environment
from harness.runs.rank_trial import WORKS


def main(arguments: list[str]) -> int:
    """Follow the supervisor that leads until it ends; returns the status that it says."""
    host, port, node, nodes, prefix = arguments
    place = Place(int(node), int(nodes), host, int(port), serves=False, prefix=prefix)
    try:
        return follow(place, WORKS, run_environment.identity())
    except Refusal as error:
        print(f"zeropp: {one_line(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
