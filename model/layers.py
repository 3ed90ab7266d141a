"""The parts of a block: grouped-query attention and SwiGLU, joined by pre-norm residual branches.

    x ──┬── norm ── attention ──(+)──┬── norm ── SwiGLU ──(+)── x
        └───────────────────────┘    └────────────────────┘

LLaMA (Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2): RMSNorm before each branch,
no biases, SwiGLU, rotary positions inside attention.
"""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from model.config import ModelConfig
from model.positions.base import PositionEncoding

NORM_EPS = 1e-5

# Stores new keys and values `(batch, kv_heads, seq, head_dim)` and returns those of all tokens so far.
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key/value head (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.n_heads, self.kv_heads = config.head_dim, config.n_heads, config.kv_heads
        # Rows of all query heads, then of all key heads, then of all value heads: one product instead of three.
        self.qkv = nn.Linear(config.dim, (config.n_heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(
        self,
        x: Float[Tensor, "batch seq dim"],
        encoding: PositionEncoding,
        mask: Bool[Tensor, "#batch 1 seq keys"] | Float[Tensor, "#batch heads seq keys"] | None,
        remember: Remember | None,
    ) -> Float[Tensor, "batch seq dim"]:
        """`mask` None means: each token sees itself and all before it."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        qk, v = heads.split((self.n_heads + self.kv_heads, self.kv_heads), dim=1)
        q, k = encoding.rotate(qk).split((self.n_heads, self.kv_heads), dim=1)
        if remember is not None:
            k, v = remember(k, v)
        # is_causal aligns queries and keys at the top left, so it is right only when none are cached;
        # a single token without a mask sees every key.
        causal = mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.kv_heads != self.n_heads
        )
        return self.out(y.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): Shazeer 2020, "GLU Variants Improve Transformer", equation 6."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.ffn = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch seq dim"],
        encoding: PositionEncoding,
        mask: Tensor | None,
        remember: Remember | None,
    ) -> Float[Tensor, "batch seq dim"]:
        x = x + self.dropout(self.attention(self.attention_norm(x), encoding, mask, remember))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))
