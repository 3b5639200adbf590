"""Signs with a majority vote (arXiv 1810.05291) and error feedback (arXiv 1901.09847): one bit an element."""

import torch
from torch.nn.functional import pad

from zeropp import ReductionMethod


class SignVote(ReductionMethod):
    """Sends the sign of each element to the rank that keeps it, where the majority decides."""

    laws = ("same_on_all_ranks", "zero")

    def __init__(self, unit, wire, feedback=True):
        super().__init__(unit, wire)
        self.feedback = feedback
        self.kept["left"] = torch.zeros(unit.numel, device=wire.device)
        self.bits = 2 ** torch.arange(8, dtype=torch.uint8, device=wire.device)
        self.used = torch.zeros(unit.numel, dtype=torch.bool, device=wire.device)  # False for padding
        for slot in unit.slots:
            self.used[slot.offset : slot.end] = True

    def start(self, gradient):
        wanted = gradient + self.kept["left"]
        size = wanted.abs().sum() / self.used.sum()  # the mean magnitude
        positive = wanted > 0
        if self.feedback:
            self.kept["left"] = (wanted - torch.where(positive, size, -size)) * self.used
        rows = self.unit.rows(positive, self.wire.size())  # (ranks, S)
        rows = pad(rows, (0, -rows.shape[1] % 8)).view(len(rows), -1, 8)
        packed = (rows * self.bits).sum(2, dtype=torch.uint8)  # (ranks, S / 8)
        self.sent = self.wire.all_to_all(packed), self.wire.all_gather(size)

    def finish(self):
        packed, sizes = (sent.wait() for sent in self.sent)
        positive = packed[..., None].bitwise_and(self.bits).ne(0).view(len(packed), -1)
        votes = 2 * positive[:, : self.unit.shard].sum(0) - len(packed)
        return votes.sign() * sizes.mean()

    def bytes(self, unit, topology):
        return [("all_to_all", "world", -(-unit.shard // 8)), ("all_gather", "world", 4)]
