"""RoPE and the sinusoid against independent forms in fp64."""

import cmath
import math

import pytest
import torch

from model.config import ModelConfig, RopeConfig, ScalingConfig, SinusoidalConfig
from model.positions import ENCODINGS, encoding_class
from model.positions.base import PositionEncoding
from model.positions.rope import Rotary, apply_rotary_pos_emb, rope_frequencies
from model.positions.sinusoidal import sinusoidal_table


def heads(seed: int = 0, shape: tuple[int, ...] = (2, 3, 7, 16)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row(*positions: int) -> torch.Tensor:
    return torch.tensor([positions])


def test_frequencies_by_hand():
    assert torch.allclose(rope_frequencies(8), torch.tensor([1, 0.1, 0.01, 0.001]).double(), rtol=1e-6)
    assert rope_frequencies(64)[0] == 1  # pair 0 is the fastest
    with pytest.raises(ValueError, match="head_dim is 15"):
        rope_frequencies(15)


def test_position_zero_is_the_identity_and_keeps_lane_order():
    x = torch.arange(8.0)[None, None, None]
    assert torch.equal(apply_rotary_pos_emb(x, row(0)), x)


def test_norms_of_pairs_are_kept():
    x = heads()
    turned = apply_rotary_pos_emb(x, torch.randint(0, 10**5, (2, 7)))
    assert torch.allclose(turned.unflatten(-1, (-1, 2)).norm(dim=-1), x.unflatten(-1, (-1, 2)).norm(dim=-1), rtol=1e-12)


def test_score_depends_on_the_difference_of_positions_only():
    q, k = heads(1, (1, 1, 1, 16)), heads(2, (1, 1, 1, 16))

    def score(i: int, j: int) -> float:
        return float((apply_rotary_pos_emb(q, row(i)) * apply_rotary_pos_emb(k, row(j))).sum())

    for i, j in ((5, 3), (100, 2), (7, 7)):
        for shift in (1, 37, 10_000):
            assert score(i + shift, j + shift) == pytest.approx(score(i, j), abs=1e-9)
    assert abs(score(5, 3) - score(5, 4)) > 1e-3  # and it does depend on the difference


def test_equals_complex_multiplication():
    x, positions = heads(), torch.tensor([[0, 1, 2, 3, 50, 1000, 65_536], [9, 8, 7, 6, 5, 4, 3]])
    turned = apply_rotary_pos_emb(x, positions)
    for b, h, t, k in ((0, 0, 4, 0), (0, 2, 6, 7), (1, 1, 3, 5), (1, 2, 0, 2)):
        z = complex(x[b, h, t, 2 * k], x[b, h, t, 2 * k + 1])
        angle = int(positions[b, t]) * 10000.0 ** (-2 * k / 16)
        expected = z * cmath.exp(1j * angle)
        assert complex(turned[b, h, t, 2 * k], turned[b, h, t, 2 * k + 1]) == pytest.approx(expected, abs=1e-9)
    angles = positions[:, None, :, None] * 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(turned, torch.view_as_real(z).flatten(-2), atol=1e-9)


def test_equals_half_split_layout_of_transformers_after_the_permutation():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_split

    q, k, positions = heads(1).float(), heads(2).float(), torch.arange(7)[None].expand(2, -1)
    to_halves = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    angles = positions[..., None] * rope_frequencies(16).float()
    angles = torch.cat((angles, angles), dim=-1)
    theirs = half_split(q[..., to_halves], k[..., to_halves], angles.cos(), angles.sin())
    for ours, other in zip((q, k), theirs, strict=True):
        turned = apply_rotary_pos_emb(ours, positions)
        assert torch.allclose(turned[..., to_halves], other, atol=1e-5)
        assert not torch.allclose(turned, other, atol=1e-2)


def test_documented_signature():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = heads().to(dtype)
        turned = apply_rotary_pos_emb(x, torch.arange(7)[None].expand(2, -1))
        assert turned.shape == x.shape and turned.dtype == dtype


def test_any_view_can_be_rotated():
    x = torch.randn(2, 3, 7, 33)
    view = x[..., 1:17]
    assert torch.equal(apply_rotary_pos_emb(view, row(*range(7))), apply_rotary_pos_emb(view.clone(), row(*range(7))))
    assert apply_rotary_pos_emb(x[..., 32:].expand(-1, -1, -1, 4), row(*range(7))).shape == (2, 3, 7, 4)


def test_rope_in_fp32_stays_near_fp64_at_far_positions():
    x, positions = heads(0, (1, 1, 5, 16)), row(0, 1000, 4096, 30_000, 65_536)
    exact = apply_rotary_pos_emb(x, positions)
    # fp32 angles are off by up to 2.4e-3 in cos at 65,536; bf16 tables would be off by 2.
    assert (apply_rotary_pos_emb(x.float(), positions) - exact).abs().max() < 5e-3 * x.abs().max()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["none", "yarn"])
def test_gradients_of_heads_that_rope_turns_are_those_of_autograd(kind: str, kv_heads: int):
    """On a CPU it writes its backward pass out; a subclass with a rotation of its own gets that one, and autograd."""
    scaling = ScalingConfig(kind=kind, factor=2.0, trained_length=7) if kind != "none" else ScalingConfig()
    config = ModelConfig(dim=64, n_heads=4, n_kv_heads=kv_heads, rope=RopeConfig(scaling=scaling))
    positions = torch.tensor([[0, 1, 2, 3, 50, 1000, 60], [9, 8, 7, 6, 5, 4, 3]])

    class Other(Rotary):
        def rotate(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().rotate(x)

    weight = heads(3, (2, 7, 4 + 2 * kv_heads, 16)).float()
    gradients, values = [], []
    for encoding, split in ((Rotary, Rotary.split), (Rotary, PositionEncoding.split), (Other, Other.split)):
        x = heads(4, weight.shape).float().requires_grad_()
        parts = split(encoding(config, positions, positions), x.clone(), 4, kv_heads)  # it may overwrite them
        assert [part.shape for part in parts] == [(2, n, 7, 16) for n in (4, kv_heads, kv_heads)]
        # Squared, so that the gradients that come back depend on what went out.
        (torch.cat(parts, dim=1).transpose(1, 2) ** 2 * weight).sum().backward()
        gradients.append(x.grad)
        values.append(torch.cat(parts, dim=1))
    assert torch.equal(values[0], values[1]) and torch.allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(values[2][:, : 4 + kv_heads], 2 * values[0][:, : 4 + kv_heads])
    assert torch.allclose(
        gradients[2][:, :, : 4 + kv_heads], 4 * gradients[0][:, :, : 4 + kv_heads], rtol=1e-5, atol=1e-5
    )


def test_sinusoid_by_the_formula():
    table = sinusoidal_table(row(0, 1, 17, 5000), 6)[0]
    for t, p in enumerate((0, 1, 17, 5000)):
        for k in range(3):
            angle = p * 10000 ** (-2 * k / 6)
            assert float(table[t, 2 * k]) == pytest.approx(math.sin(angle), abs=5e-4)
            assert float(table[t, 2 * k + 1]) == pytest.approx(math.cos(angle), abs=5e-4)
    with pytest.raises(ValueError, match="dim is 33"):
        sinusoidal_table(row(0), 33)


@pytest.mark.parametrize("ratio, rms", [(1.0, 0.02), (0.5, 1.0), (3.0, 0.2263)])
def test_sinusoid_enters_at_the_stated_ratio(ratio: float, rms: float):
    config = ModelConfig(position="sinusoidal", embedding_rms=rms, sinusoidal=SinusoidalConfig(ratio=ratio))
    positions = torch.arange(4096)[None]
    added = encoding_class("sinusoidal")(config, positions, positions).embed(torch.zeros(1, 4096, config.dim))
    assert float(added.pow(2).mean().sqrt()) == pytest.approx(ratio * rms, rel=1e-3)


def test_registry_names_classes_that_exist():
    assert {"rope", "sinusoidal"} <= ENCODINGS.keys()
    for name in ENCODINGS:
        assert isinstance(encoding_class(name), type)
