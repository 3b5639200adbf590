"""PowerSGD with error feedback (arXiv 1905.13727): two thin matrices are sent in place of each gradient matrix."""

import torch

from zeropp import ReductionMethod


class PowerSGD(ReductionMethod):
    """Sends P (n, r) and Q (m, r) of a matrix M (n, m); a vector is a matrix with one column, and arrives exactly."""

    laws = ("same_on_all_ranks", "zero", "exact_at_full_rank")

    def __init__(self, unit, wire, rank=4):
        super().__init__(unit, wire)
        draw = torch.Generator().manual_seed(0)  # Q is equal on all ranks
        for i, slot in enumerate(unit.slots):
            n, m = slot.matrix
            self.kept[f"q{i}"] = torch.randn(m, min(rank, n, m), generator=draw).to(wire.device)
            self.kept[f"error{i}"] = torch.zeros(n, m, device=wire.device)

    def start(self, gradient):
        errors, q = self._kept("error"), [torch.linalg.qr(q)[0] for q in self._kept("q")]
        parts = [gradient[slot.offset : slot.end] for slot in self.unit.slots]
        self.m, self.p = [part.view(e.shape) + e for part, e in zip(parts, errors, strict=True)], None
        self._send([m @ q for m, q in zip(self.m, q, strict=True)])

    def advance(self):
        if self.p is None:
            self.p = [torch.linalg.qr(p)[0] for p in self._mean()]
            self._send([m.T @ p for m, p in zip(self.m, self.p, strict=True)])

    def finish(self):
        self.advance()
        whole = torch.zeros(self.unit.numel, device=self.wire.device)
        for i, (slot, q) in enumerate(zip(self.unit.slots, self._mean(), strict=True)):
            low = self.p[i] @ q.T
            self.kept |= {f"q{i}": q, f"error{i}": self.m[i] - low}
            whole[slot.offset : slot.end] = low.flatten()
        return whole[self.unit.own]

    def bytes(self, unit, topology):
        pairs = list(zip(self._kept("error"), self._kept("q"), strict=True))
        sizes = sum(len(e) * q.shape[1] for e, q in pairs), sum(q.numel() for _, q in pairs)
        return [("all_gather", "world", 4 * size) for size in sizes]

    @staticmethod
    def full_rank(unit, **arguments):
        return {"rank": max(slot.numel for slot in unit.slots)}

    def _kept(self, name):
        return [self.kept[f"{name}{i}"] for i in range(len(self.unit.slots))]

    def _send(self, tensors):
        self.shapes = [tensor.shape for tensor in tensors]
        self.sent = self.wire.all_gather(torch.cat([tensor.flatten() for tensor in tensors]))

    def _mean(self):
        parts = self.sent.wait().mean(0).split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
