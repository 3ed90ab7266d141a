"""The decoder: token ids in, logits out, with exactly one position encoding active."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.config import EMBEDDING_STD, ModelConfig
from model.generation import KVCache
from model.layers import Block, RMSNorm
from model.loss import summed_loss
from model.positions import encoding_class
from model.positions.base import PositionEncoding


class Transformer(nn.Module):
    """A LLaMA-style language model.

    Two models that differ only in `config.position` have the same parameters, and from the same seed
    the same initial weights, bit for bit: no encoding owns a parameter or draws a random number.

    Args:
        config: shape and position encoding.
        vocab_size: number of token ids, from the tokenizer.
        seed: seeds the initial weights with a generator of their own; the global one is left alone
            except for the draws that torch's layers make and we overwrite.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.encoding = encoding_class(config.position)
        # Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": changes memory and time, no gradient.
        self.activation_checkpointing = False
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim)
        # A tied head is the embedding itself and has no name of its own: nothing to untie by accident.
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, vocab_size, bias=False)
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every weight anew from `seed`: normal, norms at 1."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = self.config.init_std / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            role = name.removesuffix(".weight").rpartition(".")[2]
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif role in ("embedding", "head"):
                parameter.normal_(0.0, EMBEDDING_STD, generator=generator)
            elif role in ("out", "down"):
                parameter.normal_(0.0, residual_std, generator=generator)
            else:
                parameter.normal_(0.0, self.config.init_std, generator=generator)

    def hidden_states(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "#batch seq"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch seq dim"]:
        """Everything but the output head: the normed residual stream after the last block."""
        return self._hidden_states(tokens, positions, cache)  # under fsdp a call of this one gathers weights, once

    def _hidden_states(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> Float[Tensor, "batch seq dim"]:
        seq = tokens.shape[1]
        past = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(past, past + seq, device=tokens.device)[None]
        key_positions = positions
        if cache is not None:
            all_tokens, key_positions = cache.extend(tokens, positions)
            if past and self.encoding.outgrows_cache(self.config, past + seq):
                cache.length += seq
                return self._hidden_states(all_tokens, key_positions)[:, -seq:]
        encoding = self.encoding(self.config, positions, key_positions)
        mask = attention_mask(encoding, seq, past, self.config.window, tokens.device)

        x = self.embedding(tokens) * (self.config.embedding_rms / EMBEDDING_STD)
        x = F.dropout(encoding.embed(x), self.config.dropout, self.training)
        for layer, block in enumerate(self.blocks):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, encoding, mask, None, use_reentrant=False)
            else:
                x = block(x, encoding, mask, None if cache is None else partial(cache.append, layer))
        if cache is not None:
            cache.length += seq
        return self.norm(x)

    def logits(self, hidden: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq vocab"]:
        """Scores of every next token for hidden states of any positions, before softmax."""
        return F.linear(hidden, self.output_head)

    @property
    def output_head(self) -> Float[Tensor, "vocab dim"]:
        return self.embedding.weight if self.head is None else self.head.weight

    def last_logits(
        self, tokens: Int[Tensor, "batch seq"], cache: KVCache | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Logits of the token after the last of `tokens`; the head runs on that one alone."""
        return self.logits(self.hidden_states(tokens, cache=cache)[:, -1:])[:, 0]

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "#batch seq"] | None = None,
        cache: KVCache | None = None,
        targets: Int[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq vocab"] | Float[Tensor, ""]:
        """Logits of the token after each of `tokens`, or with `targets` the sum of their losses in nats.

        Args:
            tokens: ids.
            positions: position of each token, any non-negative integers; default 0, 1, 2, ... counted
                on from what the cache holds. There is no longest position.
            cache: keys and values of the tokens before these; it is extended in place.
            targets: the token after each of `tokens`, for training.
        """
        hidden = self._hidden_states(tokens, positions, cache)
        return self.logits(hidden) if targets is None else summed_loss(hidden, self.output_head, targets)


def attention_mask(
    encoding: PositionEncoding, seq: int, past: int, window: int | None, device: torch.device
) -> Tensor | None:
    """What attention adds to its scores for `seq` tokens after `past` cached ones; None for plain causal."""
    bias = encoding.bias()
    plain = (seq == 1 or past == 0) and (window is None or past + seq <= window)
    if plain and bias is None:
        return None
    # Lower-right alignment: the last query sees every key, or the last `window` of them.
    visible = torch.ones(seq, past + seq, dtype=torch.bool, device=device).tril(past)[None, None]
    if window is not None:
        visible = visible.triu(past - window + 1)
    return visible if bias is None else bias.masked_fill(~visible, -math.inf)
