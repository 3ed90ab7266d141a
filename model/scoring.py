"""Negative log-likelihood of tokens: validation and every length measurement go through here."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from model.loss import token_losses
from model.parallel import Team
from model.transformer import Transformer

# Gives x and y, both `(windows, length)` ids, from an array of starts and a length.
Read = Callable[[Any, int], tuple[Tensor, Tensor]]


@torch.no_grad()
def score(
    model: Transformer,
    tokens: Int[Tensor, "batch seq"],
    targets: Int[Tensor, "batch scored"],
    context: int | None = None,
) -> Float[Tensor, "batch scored"]:
    """Nats of the targets that follow the last `scored` of `tokens`, each seen with all tokens before it.

    With `context`, the tokens stand at the end of so many positions.

    The head runs on the scored positions only, so a long context costs no memory for unused logits.
    The model's train/eval mode is restored.
    """
    was_training = model.training
    model.eval()
    try:
        end = context or tokens.shape[1]
        positions = torch.arange(end - tokens.shape[1], end, device=tokens.device)[None]
        hidden = model.hidden_states(tokens, positions)[:, -targets.shape[1] :]
        return token_losses(model.logits(hidden), targets)
    finally:
        model.train(was_training)


def score_windows(
    model: Transformer,
    read: Read,
    starts: Any,
    context: int,
    scored: int,
    batch_tokens: int,
    autocast: AbstractContextManager,
) -> Iterator[tuple[Float[Tensor, "batch scored"], Int[Tensor, "batch scored"]]]:
    """Score the last `scored` targets of every window, some windows at a time.

    Where attention is limited, what no target can see through all layers is not fed.

    Args:
        read: reads windows.
        starts: array of where the windows start, `(windows,)`.
        context: tokens fed in each window.
        batch_tokens: tokens in one forward pass; the result does not depend on it.

    Yields nats and target ids of each batch, on the CPU and in order.
    """
    device = model.embedding.weight.device
    window = model.config.window
    seen = context if window is None else min(context, scored + model.config.n_layers * (window - 1))
    batch_size = max(1, batch_tokens // seen)
    for first in range(0, len(starts), batch_size):
        x, y = read(starts[first : first + batch_size] + (context - seen), seen)
        targets = y[:, -scored:].contiguous()
        with autocast:
            nats = score(model, x.to(device), targets.to(device), context)
        yield nats.cpu(), targets


def measure(
    model: Transformer,
    read: Read,
    starts: Any,
    context: int,
    scored: int,
    token_bytes: Int[Tensor, "vocab"],
    batch_tokens: int,
    autocast: AbstractContextManager,
    team: Team | None = None,
) -> dict[str, float]:
    """Loss of the last `scored` targets of every window: sums over counts, in nats per token and bits per byte.

    Args as for score_windows, and `token_bytes`, the bytes of text each id stands for; the processes of a `team` share
    the windows, must all call this, and get the same result.
    """
    own, counted = team.portion(starts) if team else (starts, len(starts))
    nats, count, size = 0.0, 0, 0
    for losses, targets in score_windows(model, read, own, context, scored, batch_tokens, autocast):
        nats += losses[:counted].double().sum().item()
        count += targets[:counted].numel()
        size += int(token_bytes[targets[:counted]].sum())
        counted = max(0, counted - len(targets))
    if team:
        nats, count, size = map(sum, zip(*team.collect((nats, count, size)), strict=True))
    loss = nats / count
    return {
        "loss": loss,
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity": math.exp(min(loss, 700.0)),
        "targets": count,
        "bytes": size,
    }
