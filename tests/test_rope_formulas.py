"""The formulas of docs/rope.md, by their numbers there, in fp64."""

import cmath
import math
import re

import pytest
import torch
from conftest import ROOT

from model.config import ModelConfig
from model.positions.rope import apply_rotary_pos_emb, rope_frequencies, rope_tables, rotate_pairs
from model.transformer import Transformer

PAGE = (ROOT / "docs/rope.md").read_text()


def vector(seed: int, d: int = 16) -> torch.Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turn(x: torch.Tensor, position: int) -> torch.Tensor:
    """What the code makes of one head vector at one position."""
    return apply_rotary_pos_emb(x[None, None, None], torch.tensor([[position]]))[0, 0, 0]


def matrix(angle: float) -> torch.Tensor:
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)


def big_matrix(position: int, d: int = 16) -> torch.Tensor:
    return torch.block_diag(*(matrix(position * 10000 ** (-2 * k / d)) for k in range(d // 2)))


def pairs(x: torch.Tensor) -> list[complex]:
    return [complex(a, b) for a, b in x.view(-1, 2).tolist()]


def test_formula_01_rotation_matrix():
    x = vector(0, 2)  # one pair, whose speed is 1
    assert torch.allclose(turn(x, 3), matrix(3.0) @ x, atol=1e-12)
    assert turn(torch.tensor([1.0, 0.0]).double(), 1).tolist() == pytest.approx(
        [math.cos(1), math.sin(1)]
    )  # anticlockwise


def test_formula_02_angle_is_position_times_frequency():
    cos, sin = rope_tables(torch.tensor([[0, 1, 7, 5000]]), rope_frequencies(8), torch.float64)
    for t, p in enumerate((0, 1, 7, 5000)):
        for k in range(4):
            assert float(cos[0, 0, t, k]) == pytest.approx(math.cos(p * 0.1**k), abs=1e-9)
            assert float(sin[0, 0, t, k]) == pytest.approx(math.sin(p * 0.1**k), abs=1e-9)


def test_formula_03_frequencies():
    for d in (2, 8, 32, 128):
        assert rope_frequencies(d).tolist() == pytest.approx([10000 ** (-2 * k / d) for k in range(d // 2)], rel=1e-12)


def test_formula_04_transpose_turns_back():
    for position in (1, 5, 1000):
        assert torch.allclose(big_matrix(position).T @ turn(vector(0), position), vector(0), atol=1e-9)
        assert torch.allclose(big_matrix(position).T, big_matrix(-position), atol=1e-12)


def test_formula_05_score_depends_on_key_minus_query():
    q, k = vector(1), vector(2)
    for i, j in ((9, 4), (4, 4), (1000, 3)):
        score = turn(q, i) @ turn(k, j)
        assert torch.allclose(score, q @ big_matrix(j - i) @ k, atol=1e-9)
    # The sign matters: the other way round is another number.
    assert abs(float(turn(q, 9) @ turn(k, 4) - q @ big_matrix(9 - 4) @ k)) > 1e-3


def test_formula_06_euler():
    for angle in (0.0, 1.0, -2.5, math.pi):
        assert cmath.exp(1j * angle) == pytest.approx(complex(math.cos(angle), math.sin(angle)))


def test_formula_07_rotation_is_complex_multiplication():
    x = vector(3)
    for z, turned, theta in zip(pairs(x), pairs(turn(x, 11)), rope_frequencies(16).tolist(), strict=True):
        assert turned == pytest.approx(z * cmath.exp(1j * 11 * theta))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_forms_are_the_same(dtype: torch.dtype):
    x = torch.randn(2, 3, 9, 16).to(dtype).transpose(1, 2)  # as the model hands it over, not contiguous
    tables = rope_tables(torch.arange(3)[None] * 1000, rope_frequencies(16))
    as_complex, as_real = rotate_pairs(x, torch.complex(*tables)), rotate_pairs(x, tables)
    assert as_complex.dtype == as_real.dtype == dtype
    assert torch.allclose(as_complex, as_real, atol=1e-6 if dtype != torch.bfloat16 else 2e-2)
    assert not torch.allclose(as_real, x, atol=0.1)


def test_formula_08_complex_score():
    q, k = vector(4, 2), vector(5, 2)
    (a,), (b,) = pairs(q), pairs(k)
    for m, n in ((7, 2), (50, 49)):
        left = float(turn(q, m) @ turn(k, n))
        assert left == pytest.approx((a * cmath.exp(1j * m) * (b * cmath.exp(1j * n)).conjugate()).real)
        assert left == pytest.approx((a * b.conjugate() * cmath.exp(1j * (m - n))).real)


def test_formula_09_head_score_is_the_sum_over_pairs():
    q, k, m, n = vector(6), vector(7), 31, 12
    terms = [
        (a * b.conjugate() * cmath.exp(1j * (m - n) * theta)).real
        for a, b, theta in zip(pairs(q), pairs(k), rope_frequencies(16).tolist(), strict=True)
    ]
    assert float(turn(q, m) @ turn(k, n)) == pytest.approx(sum(terms))


def test_formula_10_periods():
    frequencies = rope_frequencies(32)
    assert 2 * math.pi / float(frequencies[0]) == pytest.approx(6.2832, abs=1e-4)
    assert 2 * math.pi / float(frequencies[-1]) == pytest.approx(2 * math.pi * 10000 ** (1 - 2 / 32))
    assert (2 * math.pi / frequencies <= 128).tolist() == [True] * 6 + [False] * 10


def test_low_pairs_are_the_high_frequencies():
    frequencies = rope_frequencies(64)
    assert frequencies[0] == 1 and (frequencies.diff() < 0).all()


def model(layers: int = 2) -> Transformer:
    return Transformer(ModelConfig(dim=32, n_layers=layers, n_heads=2, ffn_dim=64, init_std=0.2), 50).eval()


def test_values_carry_no_position():
    """With all scores alike, attention is a mean of values; where the tokens stand then changes nothing at all."""
    m, x = model(), torch.arange(10)[None]
    with torch.no_grad():
        for block in m.blocks:
            block.attention.qkv[:32].zero_()  # the rows of the queries
        assert torch.equal(m(x), m(x, positions=torch.tensor([[3, 1, 4, 15, 9, 2, 6, 5, 35, 8]])))


def test_shifting_all_positions_changes_no_logit():
    m, x = model(), torch.arange(10)[None]
    with torch.no_grad():
        assert torch.allclose(m(x), m(x, positions=torch.arange(100, 110)[None]), atol=1e-4)
        assert not torch.allclose(m(x), m(x, positions=2 * torch.arange(10)[None]), atol=1e-2)


def test_layouts_are_the_same_up_to_a_permutation_of_rows():
    x, positions = torch.randn(1, 9, 24, dtype=torch.float64), torch.arange(9)[None]
    query, key = (torch.randn(16, 24, dtype=torch.float64) for _ in range(2))
    rows = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))

    def halves(x: torch.Tensor) -> torch.Tensor:
        """RoPE in the layout of the Hugging Face Llama."""
        cos, sin = (torch.cat((t[0], t[0]), -1) for t in rope_tables(positions, rope_frequencies(16), torch.float64))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def scores(query: torch.Tensor, key: torch.Tensor, rotate) -> torch.Tensor:
        q, k = (rotate((x @ w.T)[:, None]) for w in (query, key))
        return q @ k.transpose(-1, -2)

    ours = scores(query, key, lambda x: apply_rotary_pos_emb(x, positions))
    assert torch.allclose(ours, scores(query[rows], key[rows], halves), atol=1e-10)
    assert not torch.allclose(ours, scores(query, key, halves), atol=1e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_tables_stay_exact_in_a_bf16_model(autocast: bool):
    m = model().bfloat16()
    positions = torch.arange(65_537)[None]
    angles = positions[0, :, None].double() * rope_frequencies(16)
    for _ in range(2):  # with a cold and with a warm autocast cache
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            encoding = m.encoding(m.config, positions, positions)
        assert encoding.turns.dtype == torch.complex64
        assert (encoding.turns.real[0, 0] - angles.cos()).abs().max() < 5e-3
        assert (encoding.turns.imag[0, 0] - angles.sin()).abs().max() < 5e-3
    assert not any("cos" in name or "freq" in name for name in m.state_dict())


# --- the page itself


def test_every_test_named_on_the_page_exists():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) >= 15
    assert named <= globals().keys()


def test_every_formula_of_the_page_names_its_test():
    numbers = re.findall(r"^\*\*\((\d+)\)\*\*", PAGE, re.M)
    assert [int(n) for n in numbers] == list(range(1, 11))
    for part, number in zip(re.split(r"^\*\*\(\d+\)\*\*", PAGE, flags=re.M)[1:], numbers, strict=True):
        assert f"test_formula_{int(number):02d}_" in part


def test_every_line_of_code_quoted_on_the_page_is_in_the_code():
    quotes = re.findall(r"Code, \[([\w/.]+)\]\([^)]*\): `([^`]+)`", PAGE)
    assert len(quotes) == 6
    for path, line in quotes:
        squeezed = re.sub(r"\s+", "", (ROOT / path).read_text())
        assert re.sub(r"\s+", "", line) in squeezed, f"{path}: {line}"
