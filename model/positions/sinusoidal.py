"""Absolute sinusoids: Vaswani et al. 2017, "Attention Is All You Need", https://arxiv.org/abs/1706.03762, section 3.5."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from model.config import ModelConfig
from model.positions.base import PositionEncoding


def sinusoidal_table(positions: Int[Tensor, "batch seq"], dim: int) -> Float[Tensor, "batch seq dim"]:
    """PE(p, 2k) = sin(p w_k), PE(p, 2k+1) = cos(p w_k), w_k = 10000^(-2k/dim), in fp32, RMS 1/sqrt(2).

    Any position can be asked for; there is no table to run out of. ValueError for an odd dim.
    """
    if dim % 2:
        raise ValueError(f"dim is {dim}: sines and cosines come in pairs, so it must be even")
    frequencies = torch.tensor([10000.0 ** (-2 * k / dim) for k in range(dim // 2)], device=positions.device)
    angles = positions[:, :, None].float() * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class Sinusoidal(PositionEncoding):
    """The sinusoid is added to the token embeddings once, at a stated ratio of their amplitudes."""

    def __init__(self, config: ModelConfig, positions: Tensor, key_positions: Tensor) -> None:
        super().__init__(config, positions, key_positions)
        # A raw sinusoid has RMS 1/sqrt(2), 35 times that of 0.02-std embeddings, and would drown them.
        amplitude = math.sqrt(2) * config.sinusoidal.ratio * config.embedding_rms
        self.table = amplitude * sinusoidal_table(positions, config.dim)

    def embed(self, x: Tensor) -> Tensor:
        return x + self.table.to(x.dtype)
