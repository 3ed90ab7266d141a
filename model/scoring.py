"""Negative log-likelihood of tokens: validation and every length measurement go through here."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from model.transformer import Transformer


def token_losses(
    logits: Float[Tensor, "batch seq vocab"], targets: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Nats per target token, in fp32 whatever the dtype of the logits."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


@torch.no_grad()
def score(
    model: Transformer, tokens: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch scored"]
) -> Float[Tensor, "batch scored"]:
    """Nats of the targets that follow the last `scored` of `tokens`, each seen with all tokens before it.

    The head runs on the scored positions only, so a long context costs no memory for unused logits.
    The model's train/eval mode is restored.
    """
    was_training = model.training
    model.eval()
    try:
        hidden = model.hidden_states(tokens)[:, -targets.shape[1] :]
        return token_losses(model.logits(hidden), targets)
    finally:
        model.train(was_training)


def score_windows(
    model: Transformer,
    windows: int,
    read: Callable[[slice], tuple[Tensor, Tensor]],
    scored: int,
    batch_size: int,
    autocast: AbstractContextManager | None = None,
) -> Iterator[tuple[Float[Tensor, "batch scored"], Int[Tensor, "batch scored"]]]:
    """Score the last `scored` targets of each of `windows` windows, some at a time.

    Args:
        read: gives x and y, both `(batch, seq)` ids, of a slice of the windows.
        batch_size: windows in one forward pass; the result does not depend on it.

    Yields nats and target ids of each batch, on the CPU and in order.
    """
    device = model.embedding.weight.device
    for first in range(0, windows, batch_size):
        x, y = read(slice(first, min(first + batch_size, windows)))
        targets = y[:, -scored:].contiguous()
        with autocast or nullcontext():
            nats = score(model, x.to(device), targets.to(device))
        yield nats.cpu(), targets
