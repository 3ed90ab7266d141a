"""Compile the model with every encoding and print the largest difference to eager; run by test_compile.py.

A program of its own, since the tests' checks of shapes cannot be compiled.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model.config import SCALING_KINDS, ModelConfig, RopeConfig, ScalingConfig
from model.loss import token_losses
from model.positions import ENCODINGS
from model.transformer import Transformer

CASES = [(position, "none") for position in ENCODINGS] + [("rope", kind) for kind in SCALING_KINDS if kind != "none"]


def difference(position: str, kind: str) -> float:
    """Largest difference of loss and gradients between eager and compiled, over one graph without breaks.

    Stretched RoPE differs from plain RoPE in its tables only, so its gradients are not compiled again.
    """
    scaling = ScalingConfig(kind=kind, factor=1.0 if kind == "none" else 4.0, trained_length=16)
    config = ModelConfig(position=position, dim=32, n_layers=1, n_heads=2, ffn_dim=64, rope=RopeConfig(scaling=scaling))
    model = Transformer(config, 50)
    torch.compiler.reset()  # every case is a compilation of its own, not a recompilation of the last
    torch.manual_seed(0)
    x, y = torch.randint(50, (2, 32)), torch.randint(50, (2, 32))
    found = []
    for forward in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        if kind != "none":
            with torch.no_grad():
                found.append([forward(x)])
            continue
        loss = token_losses(forward(x), y).mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return max(float((eager - fused).abs().max()) for eager, fused in zip(*found, strict=True))


if __name__ == "__main__":
    for position, kind in CASES:
        print(position, kind, difference(position, kind), flush=True)
