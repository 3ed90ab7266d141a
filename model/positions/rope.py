"""Rotary position embedding: Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864, section 3.2.

A head of width d is read as d/2 points in the plane, (x0, x1), (x2, x3), ... The point k of a token at
position p is turned by the angle p * theta_k. The dot product of a query at i with a key at j then
depends on i - j alone, since turning both by the same angle changes nothing.
"""

from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from model.config import ModelConfig
from model.device import backward_by_hand
from model.positions.base import PositionEncoding
from model.positions.scaling import attention_factor, scaled_frequencies, trained_length


def rope_frequencies(head_dim: int, theta: float = 10000.0, fraction: float = 1.0) -> Float[Tensor, "pairs"]:
    """Radians per position of each pair, theta_k = theta^(-2k / head_dim), k = 0 .. head_dim/2 - 1, in fp64.

    Pair 0 is the fastest (one turn every 2 pi positions) and the last pair the slowest (RoFormer, equation
    15). With a fraction below 1 the int(fraction * head_dim / 2) fastest pairs turn, at the same speeds as
    ever, and the others stand still: p-RoPE (Barbero et al. 2025, https://arxiv.org/abs/2410.06205).
    ValueError for an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: rotary pairs need it even")
    pairs = head_dim // 2
    turning = int(fraction * pairs)
    return torch.tensor(
        [theta ** (-2 * k / head_dim) if k < turning else 0.0 for k in range(pairs)], dtype=torch.float64
    )


def rope_tables(
    positions: Int[Tensor, "#batch seq"],
    frequencies: Float[Tensor, "pairs"] | Float[Tensor, "#batch pairs"],
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "#batch 1 seq pairs"], Float[Tensor, "#batch 1 seq pairs"]]:
    """Cosine and sine of every rotation angle p * theta_k, computed in `dtype`, for all heads alike.

    A broadcast product, not a matmul: autocast would run a matmul in bf16, where only 641 of the
    first 2048 positions are distinct.
    """
    frequencies = frequencies.to(positions.device, dtype)
    angles = positions.to(dtype)[:, None, :, None] * frequencies.view(-1, 1, 1, frequencies.shape[-1])
    return angles.cos(), angles.sin()


def complex_turns(
    cos: Float[Tensor, "#batch 1 seq pairs"], sin: Float[Tensor, "#batch 1 seq pairs"]
) -> Complex[Tensor, "#batch 1 seq pairs"] | tuple[Tensor, Tensor]:
    """exp(i p theta_k) as one number; both parts as they are under a compiler, for compilers know no complex numbers."""
    return (cos, sin) if torch.compiler.is_compiling() else torch.complex(cos, sin)


def rotate_pairs(
    x: Float[Tensor, "batch heads seq head_dim"],
    turns: Complex[Tensor, "#batch 1 seq pairs"] | tuple[Tensor, Tensor],
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Turn each pair (x[2k], x[2k+1]) by its angle (RoFormer, equation 34); shape and dtype are kept."""
    if isinstance(turns, tuple):
        cos, sin = turns
        even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        # One complex product instead of six operations on half the lanes each: less than half the time.
        pairs = _pairs(x.to(turns.real.dtype))
        turned = torch.view_as_real(pairs * turns)
    return turned.flatten(-2).to(x.dtype)


def _pairs(x: Tensor) -> Tensor:
    """x seen as complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def apply_rotary_pos_emb(
    x: Float[Tensor, "batch num_heads seq_len head_dim"],
    pos: Int[Tensor, "#batch seq_len"],
    theta: float = 10000.0,
) -> Float[Tensor, "batch num_heads seq_len head_dim"]:
    """Rotate queries or keys `x` to their positions `pos`; the result has x's shape and dtype.

    The same as reading each pair as a complex number z and multiplying it by exp(i p theta_k). Pairs
    are interleaved. Angles are computed in fp32, or in fp64 where x is fp64. ValueError for an odd
    head_dim.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    # A copy, since a view of x may start at an odd lane, where no complex number can.
    tables = rope_tables(pos, rope_frequencies(x.shape[-1], theta), dtype)
    return rotate_pairs(x.clone(memory_format=torch.contiguous_format), complex_turns(*tables))


class Rotary(PositionEncoding):
    """RoPE in every attention layer: queries and keys are turned, values carry no position."""

    def __init__(self, config: ModelConfig, positions: Tensor, key_positions: Tensor) -> None:
        super().__init__(config, positions, key_positions)
        rope, device = config.rope, positions.device
        # fp64, rounded to fp32 in rope_tables; MPS has none.
        precise = torch.float32 if device.type == "mps" else torch.float64
        plain = rope_frequencies(config.head_dim, rope.theta, rope.fraction).to(device, precise)
        length = key_positions.amax(-1) + 1 if rope.scaling.kind == "dynamic" else None
        cos, sin = rope_tables(positions, scaled_frequencies(plain, rope.theta, rope.scaling, length))
        size = attention_factor(rope.scaling)
        self.turns = complex_turns(cos, sin) if size == 1 else complex_turns(size * cos, size * sin)

    @classmethod
    def outgrows_cache(cls, config: ModelConfig, length: int) -> bool:
        scaling = config.rope.scaling
        return scaling.kind == "dynamic" and length > trained_length(scaling)

    def rotate(self, x: Tensor) -> Tensor:
        return rotate_pairs(x, self.turns)

    def split(self, heads: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        plain = type(self).rotate is Rotary.rotate and torch.is_grad_enabled() and backward_by_hand(heads)
        if plain and heads.dtype == self.turns.real.dtype:
            return _TurnedHeads.apply(heads, self.turns, queries, keys)
        return super().split(heads, queries, keys)


class _TurnedHeads(torch.autograd.Function):
    """What PositionEncoding.split and autograd would do, but in place; and gradients are joined once."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, turns: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.turns, ctx.turned = turns, queries + keys
        heads = heads.transpose(1, 2)
        _pairs(heads[:, : ctx.turned]).mul_(turns)
        return heads.split_with_sizes((queries, keys, keys), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = torch.cat([part.transpose(1, 2) for part in grads], dim=2)
        # The transpose of a turn is the turn back.
        _pairs(grad.transpose(1, 2)[:, : ctx.turned]).mul_(ctx.turns.conj())
        return grad, None, None, None
