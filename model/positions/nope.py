"""No position encoding: Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization",
https://arxiv.org/abs/2305.19466."""

from model.positions.base import PositionEncoding


class NoPE(PositionEncoding):
    """Nothing is added anywhere: the causal mask alone, under which each token sees one more than the last, carries order."""
