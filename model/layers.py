"""The parts of a block: grouped-query attention and SwiGLU, joined by pre-norm residual branches.

    x ──┬── norm ── attention ──(+)──┬── norm ── SwiGLU ──(+)── x
        └───────────────────────┘    └────────────────────┘

LLaMA (Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2): RMSNorm before each branch,
no biases, SwiGLU, rotary positions inside attention.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from model.config import ModelConfig
from model.device import backward_by_hand
from model.positions.base import PositionEncoding

NORM_EPS = 1e-5
_EPS = torch.tensor(NORM_EPS)

# Stores new keys and values `(batch, kv_heads, seq, head_dim)` and returns those of all tokens so far.
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def matrix(rows: int, columns: int) -> nn.Parameter:
    """Weights of a product y = W x, filled by Transformer.initialise.

    A parameter and no nn.Linear: while a token is made, calling a module takes as long as its product.
    """
    return nn.Parameter(torch.empty(rows, columns))


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=NORM_EPS)

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        # Elsewhere torch has a fused kernel; on a CPU it is a chain of ten operations.
        if not backward_by_hand(x):
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight) if torch.is_grad_enabled() else x * _scale(x) * self.weight


def _scale(x: Tensor) -> Tensor:
    """1 / sqrt(mean(x^2) + eps)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_EPS, length, length, value=1 / x.shape[-1]).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = _scale(x)
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, weight = ctx.saved_tensors
        # LayerNorm's kernel told that the mean is 0; it only takes away the mean of grad * weight, which RMSNorm keeps.
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, [True, True, False]
        )
        return grad_x.add_((grad @ weight)[..., None] * scale, alpha=1 / len(weight)), grad_weight


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key/value head (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.n_heads, self.kv_heads = config.head_dim, config.n_heads, config.kv_heads
        # Rows of all query heads, then of all key heads, then of all value heads: one product instead of three.
        self.qkv = matrix((config.n_heads + 2 * config.kv_heads) * config.head_dim, config.dim)
        self.out = matrix(config.dim, config.n_heads * config.head_dim)

    def forward(
        self,
        x: Float[Tensor, "batch seq dim"],
        encoding: PositionEncoding,
        mask: Bool[Tensor, "#batch 1 seq keys"] | Float[Tensor, "#batch heads seq keys"] | None,
        remember: Remember | None,
    ) -> Float[Tensor, "batch seq dim"]:
        """`mask` None means: each token sees itself and all before it."""
        heads = F.linear(x, self.qkv).unflatten(-1, (-1, self.head_dim))
        q, k, v = encoding.split(heads, self.n_heads, self.kv_heads)
        if remember is not None:
            k, v = remember(k, v)
        # is_causal aligns queries and keys at the top left, so it is right only when none are cached;
        # a single token without a mask sees every key.
        causal = mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.kv_heads != self.n_heads
        )
        return F.linear(y.transpose(1, 2).flatten(-2), self.out)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): Shazeer 2020, "GLU Variants Improve Transformer", equation 6."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = matrix(config.ffn_dim, config.dim)
        self.up = matrix(config.ffn_dim, config.dim)
        self.down = matrix(config.dim, config.ffn_dim)

    def forward(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        if backward_by_hand(x) and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            return _SwiGLU.apply(x, self.gate, self.up, self.down)
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class _SwiGLU(torch.autograd.Function):
    """What autograd would do, in half the memory: what comes after gate and up is made again, in the place of what is done with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated, raised = F.linear(x, gate), F.linear(x, up)
        ctx.save_for_backward(x, gate, up, down, gated, raised)
        return F.linear(F.silu(gated).mul_(raised), down)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        inputs, gate, up, down, gated, raised = ctx.saved_tensors
        x, grad, gated, raised = (t.flatten(0, -2) for t in (inputs, grad, gated, raised))
        shape, grad_inner = F.silu(gated), grad @ down
        grad_raised = shape * grad_inner
        grad_down = grad.T @ shape.mul_(raised)
        grad_gated = torch.ops.aten.silu_backward.grad_input(grad_inner.mul_(raised), gated, grad_input=shape)
        grad_x = torch.addmm(grad_gated @ gate, grad_raised, up)
        return grad_x.view_as(inputs), grad_gated.T @ x, grad_raised.T @ x, grad_down


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim)
        self.ffn = SwiGLU(config)
        self.dropout = config.dropout

    def forward(
        self,
        x: Float[Tensor, "batch seq dim"],
        encoding: PositionEncoding,
        mask: Tensor | None,
        remember: Remember | None,
    ) -> Float[Tensor, "batch seq dim"]:
        x = self.join(x, self.attention(self.attention_norm(x), encoding, mask, remember))
        return self.join(x, self.ffn(self.ffn_norm(x)))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        """x + branch, in the place of the branch, for which there is no other use."""
        if self.training and self.dropout:
            branch = F.dropout(branch, self.dropout)
        return branch.add_(x) if branch.dtype == x.dtype else x + branch  # under autocast a branch is in bf16
