"""The model against transformers' Llama, against itself with a cache, and against its twin."""

import gc
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from configs.schema import parse_experiment
from model.config import SCALING_KINDS, ModelConfig, ScalingConfig
from model.generation import KVCache
from model.hub import llama_config, to_llama
from model.layers import NORM_EPS, RMSNorm, SwiGLU
from model.loss import token_losses
from model.positions import ENCODINGS
from model.transformer import Transformer

VOCAB = 97
POSITIONS = sorted(ENCODINGS)


def build(seed: int = 0, **changes: object) -> Transformer:
    config = ModelConfig(**{"dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 80, "init_std": 0.1, **changes})
    return Transformer(config, VOCAB, seed)


def ids(batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_logits_equal_transformers_llama(tied: bool, kv_heads: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = build(tie_embeddings=tied, n_kv_heads=kv_heads)
    theirs = LlamaForCausalLM(LlamaConfig(**llama_config(ours.config, VOCAB, 4096))).eval()
    missing = theirs.load_state_dict(to_llama(ours), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= ({"lm_head.weight"} if tied else set())
    x = ids(2, 200)
    with torch.no_grad():
        assert (ours(x) - theirs(input_ids=x).logits).abs().max() < 1e-4


@pytest.mark.parametrize("position", POSITIONS)
def test_a_token_never_changes_logits_before_it(position: str):
    model, x = build(position=position).eval(), ids(1, 12)
    before = model(x)
    for t in range(12):
        changed = x.clone()
        changed[0, t] = (x[0, t] + 1) % VOCAB
        after = model(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("chunks", [[10], [6, 1, 1, 1, 1], [3, 4, 3], [1] * 10])
def test_cached_logits_equal_uncached_in_any_chunking(position: str, kv_heads: int, chunks: list[int]):
    model, x = build(position=position, n_kv_heads=kv_heads).eval(), ids(3, 10)
    with torch.no_grad():
        whole = model(x)
        cache = KVCache(model.config, 3, 10)
        parts = [model(chunk, cache=cache) for chunk in x.split(chunks, dim=1)]
        assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-4
        with pytest.raises(ValueError, match="room for 10 tokens"):
            model(x[:, :1], cache=cache)


@pytest.mark.parametrize("position", POSITIONS)
def test_window_hides_what_is_further_back(position: str):
    model, x = build(position=position, window=4, n_layers=1).eval(), ids(1, 12)
    changed = x.clone()
    changed[0, 5] = (x[0, 5] + 1) % VOCAB
    with torch.no_grad():
        whole, cache = model(x), KVCache(model.config, 1, 12)
        differs = (model(changed) != whole).any(-1)[0]
        assert differs.tolist() == [5 <= t < 9 for t in range(12)]
        parts = torch.cat([model(part, cache=cache) for part in x.split([3, 1, 1, 5, 2], dim=1)], dim=1)
    assert (parts - whole).abs().max() < 1e-4


@pytest.mark.parametrize("position", POSITIONS)
def test_positions_are_data(position: str):
    """A shift of all positions leaves relative encodings alone and changes an absolute one."""
    model, x = build(position=position).eval(), ids(1, 20)
    with torch.no_grad():
        plain, shifted = model(x), model(x, positions=torch.arange(37, 57)[None])
        rows = model(x.expand(2, -1), positions=torch.stack((torch.arange(20), torch.arange(37, 57))))
    assert torch.allclose(rows[0], plain[0], atol=1e-5) and torch.allclose(rows[1], shifted[0], atol=1e-5)
    assert torch.allclose(plain, shifted, atol=1e-4) == (position != "sinusoidal")


@pytest.mark.parametrize("position", POSITIONS)
def test_order_of_tokens_matters(position: str):
    model, x = build(position=position).eval(), ids(1, 12)
    swapped = x.clone()
    swapped[0, [2, 7]] = x[0, [7, 2]]
    with torch.no_grad():
        assert (model(x)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-4


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("rms", [0.02, 1.0])
def test_first_loss_is_that_of_a_uniform_guess(position: str, rms: float):
    model, x = Transformer(ModelConfig(position=position, embedding_rms=rms), 2048), torch.randint(2048, (4, 129))
    with torch.no_grad():
        loss = token_losses(model(x[:, :-1]), x[:, 1:].contiguous()).mean()
    assert abs(float(loss) - math.log(2048)) < 0.1


@pytest.mark.parametrize(
    "position, kind", [*((p, "none") for p in POSITIONS), *(("rope", kind) for kind in SCALING_KINDS)]
)
def test_first_loss_with_the_shipped_recipe(position: str, kind: str):
    shipped = parse_experiment(["--config", "small.yaml"]).model
    scaling = ScalingConfig(kind=kind, factor=1.0 if kind == "none" else 4.0, trained_length=64)
    model = Transformer(replace(shipped, position=position, rope=replace(shipped.rope, scaling=scaling)), 2048)
    x = torch.randint(2048, (4, 129), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = token_losses(model(x[:, :-1]), x[:, 1:].contiguous()).mean()
    assert abs(float(loss) - math.log(2048)) < 0.1


def test_twins_start_bit_identical():
    rope, sinusoidal = build(position="rope").state_dict(), build(position="sinusoidal").state_dict()
    assert rope.keys() == sinusoidal.keys()
    assert all(torch.equal(rope[name], sinusoidal[name]) for name in rope)
    other = build(1).state_dict()
    assert not torch.equal(rope["embedding.weight"], other["embedding.weight"])


def test_nothing_positional_is_stored_and_tied_head_is_stored_once():
    for position in POSITIONS:
        model = build(position=position)
        assert not list(model.buffers())
        assert {name for name in model.state_dict() if "blocks" not in name} == {"embedding.weight", "norm.weight"}


def test_initial_spread_by_role():
    model = Transformer(ModelConfig(dim=256, n_layers=8, n_heads=4, ffn_dim=512, tie_embeddings=False), 4096)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            writes = name.endswith(("out", "down"))
            assert float(parameter.std()) == pytest.approx(0.02 / 4 if writes else 0.02, rel=0.03), name


def test_building_a_model_of_one_seed_does_not_depend_on_global_randomness():
    torch.manual_seed(1)
    first = build().state_dict()
    torch.manual_seed(2)
    assert all(torch.equal(first[name], tensor) for name, tensor in build().state_dict().items())


@pytest.mark.parametrize("position", POSITIONS)
def test_bf16_model_keeps_positions_exact(position: str):
    """Tables made in bf16 would alias far positions; ours are made in fp32 whatever the weights are."""
    model, x = build(position=position).eval(), ids(1, 16)
    positions = torch.arange(3000, 3016)[None]
    with torch.no_grad():
        exact = model(x, positions=positions).flatten()
        rounded = model.bfloat16()(x, positions=positions).float().flatten()
    assert F.cosine_similarity(exact, rounded, dim=0) > 0.999


@pytest.mark.parametrize("position", POSITIONS)
def test_autocast_keeps_positions_exact(position: str):
    """The first pass fills autocast's cache of weights, the second finds it; angles must not go through either."""
    model, x = build(position=position).eval(), ids(1, 16)
    positions = torch.arange(3000, 3016)[None]
    with torch.no_grad():
        exact = model(x, positions=positions).flatten()
        with torch.autocast("cpu", torch.bfloat16):
            cold, warm = (model(x, positions=positions).float().flatten() for _ in range(2))
    assert torch.equal(cold, warm)
    assert F.cosine_similarity(exact, cold, dim=0) > 0.999


def test_autocast_leaves_the_residual_stream_in_fp32():
    """Branches come in bf16 and are added; sums in bf16 would round the stream anew at every block."""
    model, dtypes = build(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, made: dtypes.append(made.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(ids(1, 16))
    assert dtypes == [torch.float32] * len(model.blocks)


@pytest.mark.parametrize("position", POSITIONS)
def test_nothing_is_kept_from_a_forward_pass(position: str):
    """A table for every length seen would be a leak."""
    model = build(position=position).eval()

    def tensors_after(lengths: range) -> int:
        with torch.no_grad():
            for length in lengths:
                model(ids(1, length))
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    assert tensors_after(range(1, 3)) == tensors_after(range(3, 40))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_are_computed_in_fp32(dtype: torch.dtype):
    """1000 squared is more than fp16 can hold."""
    x = torch.linspace(-1000, 1000, 32).to(dtype)[None, None]
    norm = build().norm
    exact = norm(x.float())
    assert torch.allclose(norm.to(dtype)(x).float(), exact, atol=1e-2)


def test_dropout_is_active_in_training_only():
    model, x = build(dropout=0.5), ids(1, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dim": 30, "n_heads": 4}, "not a multiple"),
        ({"dim": 30, "n_heads": 2}, "odd head dim of 15"),
        ({"n_heads": 4, "n_kv_heads": 3}, "not a multiple of model.n_kv_heads 3"),
        ({"n_kv_heads": 0}, "n_kv_heads 0"),
        ({"position": "ropee"}, "choose one of"),
        ({"dropout": 1.0}, "model.dropout"),
        ({"n_layers": 0}, "model.n_layers"),
        ({"embedding_rms": 0.0}, "model.embedding_rms"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, words: str):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**{"dim": 32, "n_heads": 4, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_and_its_gradients_are_torch_s(dtype: torch.dtype):
    ours, theirs = RMSNorm(16).to(dtype), torch.nn.RMSNorm(16, eps=NORM_EPS).to(dtype)
    weight = torch.randn(16, dtype=dtype)
    x = torch.randn(2, 3, 16, dtype=dtype) * torch.tensor([1e-4, 1.0, 1e3], dtype=dtype)[:, None]  # one near eps
    grad = torch.randn(2, 3, 16, dtype=dtype)
    results = []
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
        own = x.clone().requires_grad_()
        y = norm(own)
        results.append((y.detach(), *torch.autograd.grad(y, (own, norm.weight), grad)))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(ours(x), results[1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_swiglu_and_its_gradients_are_autograd_s(dtype: torch.dtype):
    ffn = SwiGLU(ModelConfig(dim=16, n_heads=2, ffn_dim=24)).to(dtype)
    for parameter in ffn.parameters():
        torch.nn.init.normal_(parameter)
    grad = torch.randn(2, 3, 16, dtype=dtype)
    results = []
    for plain in (False, True):
        x = torch.linspace(-3, 3, 96, dtype=dtype).view(2, 3, 16).requires_grad_()
        weights = ffn.gate, ffn.up, ffn.down
        y = F.linear(F.silu(F.linear(x, ffn.gate)) * F.linear(x, ffn.up), ffn.down) if plain else ffn(x)
        results.append((y.detach(), *torch.autograd.grad(y, (x, *weights), grad)))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
