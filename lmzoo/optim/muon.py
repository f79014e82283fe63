"""Muon for the matrices of the blocks, AdamW for everything else, as one optimizer with one state.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix, found by a few Newton-Schulz
steps. An embedding or a head is no such matrix: its rows are of single tokens, and mostly without a gradient. With the
`match_rms_adamw` of Liu et al. 2025 (arXiv:2502.16982) an update is scaled by 0.2 sqrt(max(rows, columns)), about the
root mean square of AdamW's, so that one learning rate and one weight decay serve both.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from ..errors import UserError
from .slices import sliced, step_whole


class MuonAdamW(Optimizer):
    """torch's Muon for the parameters in `hidden` and torch's AdamW for the others of the groups `params`.

    lr_ratio: Muon's learning rate over AdamW's, which is `lr` (with adjust_lr_fn=original it has to be far above 1).
    momentum, nesterov, ns_steps and adjust_lr_fn are Muon's, betas, eps and fused AdamW's.
    """

    def __init__(
        self,
        params: Iterable[dict],
        lr: float,
        hidden: set[nn.Parameter],
        *,
        lr_ratio: float = 1.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
    ):
        matrices, others = [], []
        for group in params:
            inside = [weight for weight in group["params"] if weight in hidden]
            outside = [weight for weight in group["params"] if weight not in hidden]
            if inside:
                raised = {word: lr_ratio * group[word] for word in ("lr", "lr_factor") if word in group}
                matrices.append(group | raised | {"name": f"muon_{group['name']}", "params": inside})
            if outside:
                others.append(group | {"params": outside})
        if not matrices:
            raise UserError("optim=muon: no matrix of the blocks is trained; take optim=adamw")
        self.halves: list[Optimizer] = [
            Muon(matrices, lr * lr_ratio, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps,
                 adjust_lr_fn=adjust_lr_fn)
        ]  # fmt: skip
        if others:
            self.halves.append(AdamW(others, lr, tuple(betas), eps, fused=fused))
        super().__init__([group for half in self.halves for group in half.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """One step of both, each on its own groups of what are now this optimizer's groups and state."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = iter(self.param_groups)
        for half in self.halves:  # loading a state puts others in the place of those that the halves knew
            half.state, half.param_groups = self.state, [next(groups) for _ in half.param_groups]
            if isinstance(half, Muon) and sliced(half):
                step_whole(half, Muon)
            else:
                half.step()
        return loss
