"""The worked example of docs/positions.md: a fifth encoding is one file and one line."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import train
from configs.schema import parse_experiment
from model.config import ModelConfig
from model.generation import KVCache
from model.positions import ENCODINGS
from model.transformer import Transformer


@pytest.fixture
def logbias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/positions.md").read_text(), re.S)
    assert len(blocks) == 2
    (tmp_path / "logbias_example.py").write_text(blocks[0])
    name, where = re.fullmatch(r'\s*"(\w+)": "model\.positions\.logbias\.(\w+)",\n', blocks[1]).groups()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENCODINGS, name, f"logbias_example.{where}")
    yield name
    sys.modules.pop("logbias_example", None)


def test_a_registered_encoding_works_everywhere(logbias: str, small_run: list[str]):
    with pytest.raises(ValueError, match="choose one of rope, sinusoidal, alibi, nope, logbias"):
        ModelConfig(position="nothing")
    config = ModelConfig(position=logbias, dim=32, n_layers=2, n_heads=2, ffn_dim=64, init_std=0.2)
    model, x = Transformer(config, 50).eval(), torch.randint(50, (2, 12))
    positions = torch.arange(3)[None]
    bias = model.encoding(config, positions, positions).bias()
    assert bias[0, 1, 2].tolist() == pytest.approx([-math.log(3), -math.log(2), 0.0])
    with torch.no_grad():
        whole, cache = model(x), KVCache(config, 2, 12)
        parts = torch.cat([model(part, cache=cache) for part in x.split([5, 1, 6], dim=1)], dim=1)
        assert (parts - whole).abs().max() < 1e-4

    experiment = parse_experiment([*small_run, f"--model.position={logbias}"])
    train.run(experiment, type("NoStop", (), {"graceful": False, "signal": None})())
    curve = json.loads((experiment.run_dir / "lengths.json").read_text())["by_context"]
    assert [row["context"] for row in curve][-1] == 512 and all(math.isfinite(row["loss"]) for row in curve)
