"""Optimizers whose arithmetic needs whole matrices, where each rank has a slice of every weight, as under FSDP2."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


class Adafactor(torch.optim.Adafactor):
    """torch's, which keeps the means of a matrix's squared gradients over rows and columns: each rank has these whole.

    The words are torch's own: `eps` is of the root of the second moment and of a weight's size, `d` clips an update.
    """

    def __init__(
        self,
        params: Iterable[dict],
        lr: float,
        *,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
    ):
        super().__init__(params, lr, beta2_decay, eps, d)

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        if not sliced(self):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_whole(self, torch.optim.Adafactor)
        return loss


def sliced(optimizer: Optimizer) -> bool:
    """Whether each rank has a slice of the optimizer's weights."""
    return any(isinstance(weight, DTensor) for group in optimizer.param_groups for weight in group["params"])


def step_whole(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """A step of `optimizer` by torch's `kind`, on one whole weight at a time, gathered on all ranks.

    A rank keeps its slice of the new weight and of what the optimizer remembers in the weight's shape, and the rest.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is None:
                continue
            whole = nn.Parameter(gathered(weight))
            whole.grad = gathered(weight.grad)
            one = kind([group | {"params": [whole]}])
            one.state[whole] = {name: gathered(value) for name, value in optimizer.state[weight].items()}
            one.step()
            weight.copy_(slice_of(whole.detach(), weight))
            optimizer.state[weight] = {name: slice_of(value, weight) for name, value in one.state[whole].items()}


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def slice_of(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor spread over the ranks as `like` is; the same one where that isn't, or has another shape."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
