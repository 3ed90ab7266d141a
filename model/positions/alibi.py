"""Attention with linear biases: Press et al. 2022, "Train Short, Test Long", https://arxiv.org/abs/2108.12409, section 3."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from model.config import ModelConfig
from model.positions.base import PositionEncoding


def alibi_slopes(n_heads: int) -> list[float]:
    """Slope of each head, m_h = 2^(-8h/n), h = 1 .. n.

    For n that is no power of two: the slopes of the power of two below, then every other slope of twice
    that power, as in the authors' code.
    """
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: n_heads - power]


class ALiBi(PositionEncoding):
    """Scores fall linearly with distance, score = q.k / sqrt(d) - m_h (i - j), at another slope in every head."""

    def __init__(self, config: ModelConfig, positions: Tensor, key_positions: Tensor) -> None:
        super().__init__(config, positions, key_positions)
        distances = (positions[:, :, None] - key_positions[:, None, :]).float()
        slopes = torch.tensor(alibi_slopes(config.n_heads), device=positions.device)
        self.scores = -slopes[:, None, None] * distances[:, None]

    def bias(self) -> Float[Tensor, "#batch heads seq keys"]:
        return self.scores
