"""Small models as people write them, for the tests of the engine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block; optionally recomputed in backward."""

    def __init__(self, width: int, hidden: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.recompute = recompute

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


class Net(nn.Module):
    """Embedding, blocks, head; the head's weight may be the embedding's."""

    def __init__(
        self,
        width: int = 16,
        hidden: int = 40,
        depth: int = 3,
        *,
        tied: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden, recompute=recompute) for _ in range(depth))
        self.head = nn.Linear(width, width)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to a loss."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) * self.scale).square().mean()


class Odd(nn.Module):
    """Parameters of many shapes: scalar, empty, tiny; one unused, one frozen, a dict between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.blocks = nn.ModuleList(OddBlock(i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) to a loss."""
        state = {"x": x * self.frozen, "sum": x.new_zeros(())}
        for block in self.blocks:
            state = block(state)
        return (self.gain * state["x"]).square().mean() + state["sum"] + 0 * self.nothing.sum()


class OddBlock(nn.Module):
    """Takes and returns a dict; one weight frozen, one used twice."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)
        self.scale = nn.Parameter(torch.randn(3, 1), requires_grad=index != 1)
        self.idle = nn.Parameter(torch.zeros(2, 2))

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x = torch.tanh(state["x"] @ self.weight) + state["x"] @ self.weight.t()
        return {"x": x, "sum": state["sum"] + (self.scale * x.mean()).sum()}
