"""Top-k with feedback: each rank sends the largest elements of its gradient and their indices (arXiv 1712.01887)."""

import math

import torch

from zeropp import ReductionMethod


class TopK(ReductionMethod):
    """Sends the ``share`` of a unit's elements with the largest magnitudes; the rest is added to the next step's."""

    laws = ("same_on_all_ranks", "zero", "bound", "exact_at_full_rank")

    def __init__(self, unit, wire, share=0.01):
        super().__init__(unit, wire)
        self.k = max(1, math.ceil(share * unit.elements))
        self.kept["left"] = torch.zeros(unit.numel, device=wire.device)

    def start(self, gradient):
        left = self.kept["left"] = gradient + self.kept["left"]
        chosen = left.abs().topk(self.k).indices
        values = left[chosen]
        left[chosen] = 0
        self.sent = self.wire.all_gather(chosen.int()), self.wire.all_gather(values)

    def finish(self):
        whole = torch.zeros(self.unit.numel, device=self.wire.device)
        for chosen, values in zip(*(sent.wait() for sent in self.sent), strict=True):
            whole[chosen.long()] += values  # in the order of ranks; a rank's indices differ
        return whole[self.unit.own] / self.wire.size()

    def bytes(self, unit, topology):
        return [("all_gather", "world", 4 * self.k)] * 2

    @staticmethod
    def error_bound(unit, **arguments):
        return 1.0  # an element that no rank has chosen arrives as 0

    @staticmethod
    def full_rank(unit, **arguments):
        return {"share": 1.0}
