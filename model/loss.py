"""Cross-entropy, with and without all logits at once."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

# Logits held at a time, by kind of device: a vocabulary of 32,000 makes them the largest thing in memory by far.
LOGITS = {"cpu": 2**23, "cuda": 2**27, "mps": 2**25}


def token_losses(
    logits: Float[Tensor, "batch seq vocab"], targets: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Nats per target token, in fp32 whatever the dtype of the logits."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def summed_loss(
    hidden: Float[Tensor, "batch seq dim"], head: Float[Tensor, "vocab dim"], targets: Int[Tensor, "batch seq"]
) -> Float[Tensor, ""]:
    """Nats of all targets, summed in fp32, from the hidden states and the output head.

    The gradients are made together with the loss, some rows of logits at a time: as many products as usual, and never
    all logits in memory. So it can be differentiated once and not twice.
    """
    if torch.compiler.is_compiling():
        # It would write out every part of a loop, and has a fused form of its own.
        return token_losses(F.linear(hidden, head), targets).sum()
    return _SummedLoss.apply(hidden.flatten(0, 1), head, targets.flatten())


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        parts, grad_head = [], None
        sums = torch.promote_types(head.dtype, torch.float32)
        rows = max(1, LOGITS[hidden.device.type] // head.shape[0])
        for h, y in zip(hidden.split(rows), targets[:, None].split(rows), strict=True):
            # Softmax in place, in fp32: log_softmax takes fresh memory and longer than all of this.
            logits = F.linear(h, head)
            z, dtype = logits.float(), logits.dtype
            z -= z.amax(1, keepdim=True)
            at_target = z.gather(1, y)
            total_exp = z.exp_().sum(1, keepdim=True)
            total += (total_exp.log() - at_target).sum()
            # The shares, less one at the target, are the gradient by the logits.
            slope = z.mul_(total_exp.reciprocal()).scatter_add_(1, y, -torch.ones_like(at_target)).to(dtype)
            parts.append((slope @ head).to(h.dtype))
            product = (slope.T @ h).to(sums)
            grad_head = product if grad_head is None else grad_head.add_(product)
        grad_hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden.mul_(grad), grad_head.mul_(grad), None
