"""The loss that never holds all logits is the loss, and its gradients are the gradients."""

import pytest
import torch
import torch.nn.functional as F

import model.loss
from model.config import ModelConfig
from model.loss import summed_loss, token_losses
from model.transformer import Transformer


def both(dtype: torch.dtype, autocast: bool) -> list[tuple[torch.Tensor, ...]]:
    """Loss and gradients of hidden states and head: ours, and from all logits."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 16, generator=random, dtype=dtype)
    head = torch.randn(50, 16, generator=random, dtype=dtype)
    targets = torch.randint(50, (3, 7), generator=random)
    results = []
    for ours in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = summed_loss(h, w, targets) if ours else token_losses(F.linear(h, w), targets).sum()
        (loss / 21).backward()
        results.append((loss.detach(), h.grad, w.grad))
    return results


@pytest.mark.parametrize("logits", [1, 150, 500, 10**6])  # one row at a time, three, ten, all
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-6), (True, 1e-2)])
def test_loss_and_gradients_in_any_number_of_parts(
    monkeypatch: pytest.MonkeyPatch, logits: int, autocast: bool, tolerance: float
):
    monkeypatch.setitem(model.loss.LOGITS, "cpu", logits)
    ours, plain = both(torch.float32, autocast)
    assert ours[0].dtype == torch.float32
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[[300.0, 0.0]]]).requires_grad_()
    head = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]])
    loss = summed_loss(hidden, head, torch.tensor([[1]]))
    loss.backward()
    assert float(loss) == pytest.approx(600_000)
    assert hidden.grad.tolist() == [[[2000.0, 0.0]]]


def test_the_model_gives_the_loss_of_its_logits():
    m = Transformer(ModelConfig(dim=16, n_layers=1, n_heads=2, ffn_dim=32, tie_embeddings=False), 50)
    x, y = torch.randint(50, (2, 2, 9))
    assert torch.allclose(m(x, targets=y), token_losses(m(x), y).sum(), rtol=1e-6)


def test_no_step_holds_all_logits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(model.loss.LOGITS, "cpu", 50 * 1000)
    h, w = torch.randn(1, 2000, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    targets = torch.randint(1000, (1, 2000))
    with torch.profiler.profile(profile_memory=True) as profile:
        summed_loss(h, w, targets).backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 4 * 50 * 1000, "no tensor is larger than the logits of 50 rows"
