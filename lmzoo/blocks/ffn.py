"""Feed-forward: the same two-layer network at every position.

    down(activation(up(x)))              Vaswani et al. 2017, arXiv:1706.03762
    down(activation(gate(x)) * up(x))    gated linear units, Shazeer 2020, arXiv:2002.05202

With the gate's activation SiLU they are called SwiGLU, with GELU GeGLU, with ReLU ReGLU.
"""

from __future__ import annotations

from torch import Tensor, nn

from .attention import product_dtype
from .project import Projects


class FeedForward(nn.Module):
    """down(dropout(activation(up(x)))); ``activation`` is a recipe such as torch.nn.GELU."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0, *, activation, bias: bool = True):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias)
        self.down = nn.Linear(d_ff, d_model, bias)
        self.activation, self.drop = activation(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.down(self.dropped(self.activation(self.up(x))))

    def dropped(self, x: Tensor) -> Tensor:
        """Dropout, left out where it does nothing."""
        return self.drop(x) if self.training else x


class GLU(FeedForward, Projects):
    """down(dropout(activation(gate(x)) * up(x)))."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0, *, activation, bias: bool = False):
        super().__init__(d_model, d_ff, dropout, activation=activation, bias=bias)
        self.gate = nn.Linear(d_model, d_ff, bias)
        self.lay_together("gate", "up")

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        gate, up = self.project(x.to(product_dtype(x)))  # another dtype once for both
        return self.down(self.dropped(self.activation(gate) * up))


class SquaredReLU(nn.Module):
    """max(x, 0)^2 (So et al. 2021, arXiv:2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, elementwise."""
        return x.relu().square()
