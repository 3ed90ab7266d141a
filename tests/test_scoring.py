"""Losses against a one-token-at-a-time reference: each target once, whatever the batch or the context."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from data import batches
from data.prepare import Tokens
from model.config import ModelConfig
from model.loss import token_losses
from model.positions import ENCODINGS
from model.scoring import measure, score, score_windows
from model.transformer import Transformer
from train import reader

STREAM = Tokens([np.random.default_rng(0).integers(0, 50, 700).astype(np.uint16)])
READ = reader(STREAM)
STARTS = np.array([0, 150, 420, 700])


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(ModelConfig(dim=32, n_layers=2, n_heads=2, ffn_dim=64, init_std=0.2), 50).train()


def nats_one_at_a_time(model: Transformer, context: int, target: int) -> float:
    """Nats of the token at index `target` seen with the `context` tokens before it."""
    seen = torch.from_numpy(STREAM.read(target - context, target))[None]
    with torch.no_grad():
        return -float(model(seen)[0, -1].log_softmax(-1)[int(STREAM.read(target, target + 1)[0])])


# 70 tokens are 4 windows of 16, so the last batch of the 6 is shorter.
@pytest.mark.parametrize("tokens_a_batch", [1, 70, 100, 10**6])
def test_same_targets_at_every_context_equal_the_reference(model: Transformer, tokens_a_batch: int):
    block, ends = 4, batches.block_ends(STARTS, 64, 4, 24)
    bytes_of = torch.arange(50) % 4
    targets = [int(end) - block + 1 + i for end in ends for i in range(block)]
    assert len(set(targets)) == len(targets) == 24
    for context in (4, 16, 64):
        row = measure(model, READ, ends - context, context, block, bytes_of, tokens_a_batch, nullcontext())
        # The first target of a block has block - 1 tokens less before it than the last.
        seen = [context - block + 1 + i % block for i in range(24)]
        expected = [nats_one_at_a_time(model, c, t) for c, t in zip(seen, targets, strict=True)]
        assert row["loss"] == pytest.approx(math.fsum(expected) / 24, abs=1e-5)
        ids = np.concatenate([STREAM.read(t, t + 1) for t in targets])
        assert row["targets"] == 24 and row["bytes"] == int(bytes_of[ids].sum())
        assert row["bits_per_byte"] == pytest.approx(math.fsum(expected) / math.log(2) / row["bytes"], abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_every_validation_target_once_in_any_batch_size(model: Transformer, batch_size: int):
    starts = batches.validation_starts(STREAM, 20, 10**6)

    nats, targets = zip(*score_windows(model, READ, starts, 20, 20, 20 * batch_size, nullcontext()), strict=True)
    assert torch.cat(targets).flatten().tolist() == STREAM.read(1, 34 * 20 + 1).tolist()
    reference = score(model, *READ(starts, 20))
    assert torch.allclose(torch.cat(nats), reference, atol=1e-5)
    assert model.training  # as it was


@pytest.mark.parametrize("position", ENCODINGS)
def test_what_a_window_hides_need_not_be_fed(position: str):
    """Two layers reach back 2 x 4 tokens before the first scored one: feeding those alone gives what feeding all does."""
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64, "init_std": 0.2}
    model = Transformer(ModelConfig(position=position, window=5, **shape), 50)
    (nats, targets), *rest = score_windows(model, READ, STARTS[:2], 60, 4, 1000, nullcontext())
    whole = score(model, READ(STARTS[:2], 60)[0], targets)
    assert not rest and torch.allclose(nats, whole, atol=1e-5)
    fed = []
    hook = model.blocks[0].register_forward_hook(lambda block, inputs, output: fed.append(inputs[0].shape[1]))
    list(score_windows(model, READ, STARTS[:2], 60, 4, 1000, nullcontext()))
    hook.remove()
    assert fed == [4 + 2 * 4]
    if position != "sinusoidal":
        less = score(model, READ(STARTS[:2] + 49, 11)[0], targets, 60)
        assert not torch.allclose(less, whole, atol=1e-5)  # one token less is missed


def test_losses_are_fp32_sums_of_log_probabilities():
    logits, targets = torch.randn(2, 3, 11), torch.randint(11, (2, 3))
    by_hand = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(token_losses(logits, targets).double(), by_hand, atol=1e-6)
    assert token_losses(logits.bfloat16(), targets).dtype == torch.float32


def test_a_context_blind_model_gives_a_flat_curve(model: Transformer):
    class Unigram(Transformer):
        def hidden_states(self, tokens, positions=None, cache=None):
            return torch.ones(*tokens.shape, self.config.dim)

    blind = Unigram(model.config, 50)
    ends = batches.block_ends(STARTS, 64, 4, 100)
    rows = [
        measure(blind, READ, ends - c, c, 4, torch.ones(50, dtype=torch.long), 8192, nullcontext())["loss"]
        for c in (4, 8, 64)
    ]
    assert max(rows) - min(rows) < 1e-6


def test_a_copier_gains_exactly_where_its_source_comes_into_the_window(model: Transformer):
    """It predicts the token 24 places before the next one; a window of c tokens holds that token from c = 24 on."""
    gap = 24
    period = np.random.default_rng(1).permutation(50)[:gap].astype(np.uint16)
    stream = Tokens([np.tile(period, 20)])

    class Copier(Transformer):
        def hidden_states(self, tokens, positions=None, cache=None):
            seen = torch.zeros(*tokens.shape, 50)
            if tokens.shape[1] >= gap:
                seen[:, gap - 1 :] = torch.nn.functional.one_hot(tokens[:, : tokens.shape[1] - gap + 1], 50).float()
            return 100 * seen

        def logits(self, hidden):
            return hidden

    copier, ends = Copier(model.config, 50), batches.block_ends(np.array([0, 480]), 64, 1, 100)
    for context in (8, 22, 23, 24, 25, 64):
        row = measure(
            copier, reader(stream), ends - context, context, 1, torch.ones(50, dtype=torch.long), 8192, nullcontext()
        )
        assert row["loss"] == pytest.approx(0.0 if context >= gap else math.log(50), abs=1e-5)
