"""Gradients in bf16 whose exponents are compressed without loss: the mean of ZeRO-3's two hops, bit by bit."""

import torch

import zeropp
from zeropp import ReductionMethod


class Lossless(ReductionMethod):
    """In each hop, ranks first exchange how many bytes their longest message has, and then messages that long."""

    laws = ("same_on_all_ranks", "zero", "bound")

    def __init__(self, unit, wire, coder="zlib"):
        super().__init__(unit, wire)
        self.codec = zeropp.codec(f"lossless:{coder}:bf16").definition

    @staticmethod
    def error_bound(unit, coder="zlib"):
        return 2.0**-6.9  # of two casts to bf16, each within 2^-8

    def start(self, gradient):
        self.hops = self.reduce(gradient)
        next(self.hops, None)

    def advance(self):
        next(self.hops, None)

    def finish(self):
        for _ in self.hops:
            pass
        return self.mean

    def reduce(self, gradient):
        """Runs the hops; stops after each message that it has posted."""
        ranks = self.wire.topology
        rows = self.unit.rows(gradient, ranks.world).view(ranks.nodes, ranks.ranks_per_node, -1)
        sums = yield from self.hop(rows.transpose(0, 1), "local")
        total = yield from self.hop(sums, "node")
        self.mean = total / ranks.world

    def hop(self, rows, axis):
        """Sends each rank along ``axis`` its row; returns the sum of the rows that this rank has received."""
        if len(rows) == 1:
            return rows[0]
        frames = rows.new_zeros(
            len(rows), self.codec.frame_bytes(rows[0].numel()), dtype=torch.uint8, device="cpu"
        )
        for row, frame in zip(rows, frames, strict=True):
            self.codec.encode(row.reshape(-1).cpu(), frame)
        longest = torch.tensor([max(map(self.codec.used_bytes, frames))], device=self.wire.device)
        # Of all ranks, also along other axes: messages must be equally long.
        sizes = self.wire.all_gather(longest)
        yield
        frames = frames[:, : int(sizes.wait().max())].to(self.wire.device)
        sent = self.wire.all_to_all(frames, axis)
        yield
        total, term = torch.zeros(rows.shape[1:]), torch.empty(rows[0].numel())
        for frame in sent.wait().cpu():
            self.codec.decode(frame, term)
            total += term.view(total.shape)
        return total.to(self.wire.device)
