"""Every way of stretching RoPE against reference frequencies, transformers, and itself with a cache."""

import csv
from itertools import groupby

import pytest
import torch
from conftest import ROOT

from model import checkpoint
from model.config import SCALING_KINDS, ModelConfig, RopeConfig, ScalingConfig
from model.generation import KVCache, generate
from model.positions.rope import rope_frequencies
from model.positions.scaling import attention_factor, scaled_frequencies
from model.scoring import score
from model.transformer import Transformer

# Computed in fp64 for head dim 64, base 10000, L0 = 1024, and checked there against another implementation.
with (ROOT / "tests/golden/rope_frequencies.csv").open() as file:
    REFERENCE = {key: list(rows) for key, rows in groupby(csv.DictReader(file), lambda r: (r["kind"], r["parameters"]))}
STRETCHED = [kind for kind in SCALING_KINDS if kind != "none"]


def scaling(kind: str, factor: float = 4.0, trained_length: int | None = 16) -> ScalingConfig:
    return ScalingConfig(kind=kind, factor=factor, trained_length=trained_length)


def build(kind: str = "none", fraction: float = 1.0, **changes: object) -> Transformer:
    rope = RopeConfig(fraction=fraction, scaling=scaling(kind, 1.0 if kind == "none" else 4.0))
    config = {"dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 64, "init_std": 0.15, "rope": rope}
    return Transformer(ModelConfig(**{**config, **changes}), 60).eval()


def ids(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(60, (batch, seq), generator=torch.Generator().manual_seed(0))


def frequencies(
    config: ScalingConfig, fraction: float = 1.0, length: int = 1024, theta: float = 10000.0
) -> torch.Tensor:
    return scaled_frequencies(rope_frequencies(64, theta, fraction), theta, config, torch.tensor([length])).flatten()


@pytest.mark.parametrize("kind, parameters", REFERENCE)
def test_frequencies_equal_the_reference(kind: str, parameters: str):
    rows = REFERENCE[kind, parameters]
    given = dict(word.split("=") for word in parameters.split() if "=" in word)
    config = scaling("none" if kind == "p_rope" else kind, float(given.get("factor", 1)), 1024)
    made = frequencies(config, float(given.get("fraction", 1)), int(given.get("length", 1024)))
    expected = torch.tensor([float(row["frequency"]) for row in rows], dtype=torch.float64)
    assert len(rows) == 32 and torch.allclose(made, expected, rtol=1e-6, atol=0)
    assert attention_factor(config) == pytest.approx(float(rows[0]["attention_factor"]), rel=1e-6)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(
    "kind, factor", [("linear", 4.0), ("dynamic", 4.0), ("yarn", 4.0), ("yarn", 16.0), ("llama3", 8.0)]
)
def test_frequencies_equal_transformers(kind: str, factor: float, theta: float):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": 1024}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=1024, rope_parameters=parameters
    )
    theirs, factor_of_attention = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=4096)
    made = frequencies(scaling(kind, factor, 1024), length=4096, theta=theta)
    assert torch.allclose(made.float(), theirs, rtol=1e-6, atol=0)
    assert attention_factor(scaling(kind, factor)) == pytest.approx(factor_of_attention)


@pytest.mark.parametrize("kind", SCALING_KINDS)
def test_factor_one_changes_nothing(kind: str):
    assert torch.allclose(frequencies(scaling(kind, 1.0, 1024)), rope_frequencies(64), rtol=1e-12)
    assert attention_factor(scaling(kind, 1.0)) == 1


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "llama3"])
def test_kinds_that_need_the_trained_length_say_so(kind: str):
    with pytest.raises(ValueError, match=f"{kind} needs model.rope.scaling.trained_length"):
        frequencies(scaling(kind, 4.0, None))


@pytest.mark.parametrize("kind", STRETCHED)
def test_stretching_changes_the_model_and_keeps_causality_and_invariance(kind: str):
    model, plain, x = build(kind), build(), ids(1, 40)
    with torch.no_grad():
        logits = model(x)
        assert (logits - plain(x)).abs().max() > 1e-3
        for t in (0, 20, 39):
            changed = x.clone()
            changed[0, t] = (x[0, t] + 1) % 60
            assert torch.equal(model(changed)[:, :t], logits[:, :t])
        shifted = model(x, positions=torch.arange(5, 45)[None])
    # The dynamic kind looks at the length itself, so a shift is another length to it.
    assert torch.allclose(shifted, logits, atol=1e-4) == (kind != "dynamic")


@pytest.mark.parametrize("chunks", [[40], [10, 30], [20, 1, 1, 18], [1] * 40, [7] * 5 + [5]])
@pytest.mark.parametrize("kind, fraction", [*((kind, 1.0) for kind in SCALING_KINDS), ("none", 0.5), ("yarn", 0.5)])
def test_cached_logits_equal_uncached(kind: str, fraction: float, chunks: list[int]):
    """Also past L0 = 16. The dynamic kind reads a sequence by its length so far, so that is what to compare with."""
    model, x = build(kind, fraction), ids(2, 40)
    cache, end = KVCache(model.config, 2, 40), 0
    with torch.no_grad():
        for chunk in x.split(chunks, dim=1):
            end += chunk.shape[1]
            whole = model(x[:, :end] if kind == "dynamic" else x)[:, end - chunk.shape[1] : end]
            assert (model(chunk, cache=cache) - whole).abs().max() < 1e-4


def test_dynamic_returns_to_the_plain_base_for_short_sequences():
    model, plain, x = build("dynamic"), build(), ids(2, 40)
    with torch.no_grad():
        model(x)
        assert torch.equal(model(x[:, :16]), plain(x[:, :16]))
        assert not torch.allclose(model(x[:, :17]), plain(x[:, :17]), atol=1e-5)


def test_dynamic_generation_equals_the_uncached_loop():
    model, x = build("dynamic"), ids(2, 5)
    made = torch.tensor(list(generate(model, x.tolist(), 40, temperature=0.0))).T
    with torch.no_grad():
        for _ in range(40):
            x = torch.cat((x, model(x)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(made, x[:, 5:])


def test_partial_rotation_leaves_the_slow_pairs_alone():
    assert rope_frequencies(8, fraction=0.5).tolist() == pytest.approx([1, 0.1, 0, 0])
    assert rope_frequencies(8, fraction=1.0).tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    assert frequencies(scaling("ntk"), fraction=0.25)[8:].abs().max() == 0


@pytest.mark.parametrize("kind", SCALING_KINDS)
def test_a_model_trained_short_is_stretched_from_its_checkpoint_and_scores_4096(kind: str, tmp_path):
    path = checkpoint.save(tmp_path, build(), {}, {"step": 1, "context": 128})
    asked = None if kind == "none" else scaling(kind, 32.0, None)
    model = checkpoint.load_model(path, scaling=asked)
    assert kind == "none" or model.config.rope.scaling == scaling(kind, 32.0, 128)
    x, y = ids(1, 4096), ids(1, 64)
    assert torch.isfinite(score(model, x, y)).all()
