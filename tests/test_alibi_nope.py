"""ALiBi's slopes and scores by hand, and a model that is told no positions at all."""

import math

import pytest
import torch

from model.config import ModelConfig
from model.positions import encoding_class
from model.positions.alibi import alibi_slopes
from model.transformer import Transformer

# Press et al. 2022: the geometric sequence 2^(-8/n), ...; the authors' rule where n is no power of two.
SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [2**-h for h in range(1, 9)],
    12: [2**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
    16: [2 ** (-h / 2) for h in range(1, 17)],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_slopes_by_hand(heads: int):
    assert alibi_slopes(heads) == pytest.approx(SLOPES[heads], rel=1e-12)


def test_scores_by_hand():
    config = ModelConfig(position="alibi", dim=8, n_heads=2)
    bias = encoding_class("alibi")(config, torch.tensor([[3, 4]]), torch.tensor([[1, 3, 4]])).bias()
    assert bias.shape == (1, 2, 2, 3) and bias.dtype == torch.float32
    assert bias[0, 0].tolist() == [[-2 / 16, 0, 1 / 16], [-3 / 16, -1 / 16, 0]]
    assert torch.equal(bias[0, 1] * 16, bias[0, 0])


def test_attention_of_equal_scores_falls_by_the_slope():
    """With all queries and keys zero, softmax(-m (i - j)) is what must come out; the bias is not divided by sqrt(d)."""
    model = Transformer(ModelConfig(position="alibi", dim=8, n_layers=1, n_heads=1, ffn_dim=8), 5).eval()
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.qkv.zero_()
        attention.qkv[16:].copy_(torch.eye(8))  # values; queries and keys are all alike
        attention.out.copy_(torch.eye(8))
    positions, x = torch.arange(4)[None], torch.eye(8)[None, :4]
    encoding = model.encoding(model.config, positions, positions)
    from model.transformer import attention_mask

    y = attention(x, encoding, attention_mask(encoding, 4, 0, None, x.device), None)
    weights = [math.exp(-(3 - j) * 2**-8) for j in range(4)]
    assert y[0, 3, :4].tolist() == pytest.approx([w / sum(weights) for w in weights], abs=1e-6)


def test_without_positions_only_the_mask_tells_order():
    model = Transformer(
        ModelConfig(position="nope", dim=32, n_layers=1, n_heads=2, ffn_dim=64, init_std=0.2), 50
    ).eval()
    x = torch.arange(10)[None]
    swapped = x[:, [1, 0, *range(2, 10)]]
    with torch.no_grad():
        # One layer sees a set: what came before may be permuted without a change at the end.
        assert torch.allclose(model(x)[:, -1], model(swapped)[:, -1], atol=1e-5)
        assert torch.equal(model(x), model(x, positions=torch.randint(0, 1000, (1, 10))))
