"""Local steps with an outer optimizer, as in DiLoCo (arXiv 2311.08105): nodes train apart, and meet every few steps.

In a suite: ``strategy = "examples.local_steps:LocalSteps"`` with ``policy.group = "node"``, so that each node has all
states, and ``policy.reduce = "examples.local_steps:NodeMean"``, so that gradients stay inside a node.
"""

import torch

from zeropp import ReductionMethod, Strategy


class NodeMean(ReductionMethod):
    """The mean gradient of the ranks of a node."""

    def start(self, gradient):
        size = self.wire.size("local")
        self.sent = self.wire.all_to_all(self.unit.rows(gradient, size), "local")

    def finish(self):
        return self.sent.wait().mean(0)

    def bytes(self, unit, topology):
        return [("all_to_all", "local", 4 * unit.shard)]


class LocalSteps(Strategy):
    """Every ``every`` steps, moves all nodes' weights to where SGD with Nesterov momentum takes their mean."""

    def configure(self, every=8, rate=0.7, momentum=0.9):
        self.every, self.rate, self.momentum, self.steps = every, rate, momentum, 0
        self.start = [master.clone() for master in self.masters]
        self.speed = [torch.zeros_like(master) for master in self.masters]

    def step(self, optimizer, clip):
        stepped = super().step(optimizer, clip)
        self.steps += 1
        if self.steps % self.every == 0:
            moved = [start - master for start, master in zip(self.start, self.masters, strict=True)]
            sent = self.messages.all_gather(torch.cat(moved), "node")
            deltas = sent.wait().mean(0).split([len(master) for master in self.masters])
            for master, start, speed, delta in zip(self.masters, self.start, self.speed, deltas, strict=True):
                speed.mul_(self.momentum).add_(delta)
                start.sub_(self.rate * (delta + self.momentum * speed))
                master.copy_(start)
            self.weights_changed()
        return stepped
