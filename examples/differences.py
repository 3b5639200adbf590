"""A gather of differences in int8: what an error has lost is part of the next difference (as in arXiv 2410.15526)."""

import torch

from zeropp import GatherMethod


class Differences(GatherMethod):
    """Every rank keeps the weights gathered last, and adds to them the differences that the owners of shards send.

    Between nodes first, then inside them.  If weights have not changed, as in backward, nothing is sent.
    """

    laws = ("same_on_all_ranks", "zero", "bound", "settles")

    def __init__(self, unit, wire, block=64):
        super().__init__(unit, wire)
        self.block, self.blocks = block, -(-unit.shard // block)
        self.kept["copy"] = torch.zeros(unit.numel, device=wire.device)

    def start(self, weights, gather):
        self.hop, self.sent = "node", None
        if gather.change == "unchanged":
            return
        difference = weights - self.kept["copy"][self.unit.own]
        rows = torch.zeros(self.blocks, self.block, device=weights.device)
        rows.view(-1)[: self.unit.shard] = difference
        scales = rows.abs().amax(1, keepdim=True).div(127).clamp(min=1e-38)
        codes = (rows / scales).round().to(torch.int8)
        message = torch.cat([part.view(torch.uint8).flatten() for part in (codes, scales)])
        self.sent = self.wire.all_gather(message, "node")

    def advance(self):
        if self.hop == "node" and self.sent is not None:
            self.hop, self.sent = "local", self.wire.all_gather(self.sent.wait(), "local")

    def finish(self):
        self.advance()
        if self.sent is not None:
            messages = self.sent.wait().transpose(0, 1).flatten(0, 1)  # of all ranks, in rank order
            codes, scales = messages.split(self.blocks * self.block, 1)[0], messages[:, -4 * self.blocks :]
            scales = scales.contiguous().view(torch.float32).unsqueeze(-1)
            rows = codes.contiguous().view(torch.int8).view(-1, self.blocks, self.block) * scales
            self.kept["copy"] += self.unit.whole(rows.flatten(1)[:, : self.unit.shard])
        return self.kept["copy"].to(self.wire.dtype)

    def bytes(self, unit, topology, gather):
        if gather.change == "unchanged":
            return []
        message = self.blocks * (self.block + 4)
        return [("all_gather", "node", message), ("all_gather", "local", topology.nodes * message)]

    @staticmethod
    def error_bound(unit, **arguments):
        return 1 / 254  # the first difference is the weights

    @staticmethod
    def settles_after(unit, **arguments):
        return 4
