"""Checkpoints: whole or absent, exact, and unable to run code."""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from model import checkpoint
from model.config import ModelConfig, RopeConfig
from model.transformer import Transformer


def model(**changes: object) -> Transformer:
    return Transformer(ModelConfig(**{"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 32, **changes}), 40, seed=3)


def save(run: Path, step: int, val_loss: float | None = None, **changes: object) -> Path:
    return checkpoint.save(
        run / "checkpoints", model(**changes), {"x": torch.arange(3)}, {"step": step, "val_loss": val_loss}
    )


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False}, {"position": "sinusoidal"}, {"rope": RopeConfig(500000.0)}]
)
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, changes: dict):
    path = save(tmp_path, 7, **changes)
    original, loaded = model(**changes), checkpoint.load_model(path)
    assert loaded.config == original.config and loaded.vocab_size == 40
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in original.state_dict().items())
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in original.parameters())
    assert torch.equal(checkpoint.load_optimizer(path)["x"], torch.arange(3))
    assert checkpoint.read_state(path)["step"] == 7


def test_latest_best_and_pruning(tmp_path: Path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (10, 2.5)):
        save(tmp_path, step, loss)
    assert checkpoint.latest(tmp_path).name == "step-0000010"
    assert checkpoint.best(tmp_path).name == "step-0000002"
    checkpoint.prune(tmp_path, 2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-0000002", "step-0000004", "step-0000010"]
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        checkpoint.latest(tmp_path / "checkpoints")


def test_a_save_cut_short_leaves_the_old_one_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1)

    def half(value: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-0000001"]
    checkpoint.load_model(checkpoint.latest(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_damage_is_found_named_and_the_older_one_offered(tmp_path: Path, name: str):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    load = checkpoint.load_model if name.startswith("model") else checkpoint.load_optimizer
    with pytest.raises(ValueError, match=rf"{name} is missing or damaged; delete .*0002 to go on from .* step-0000001"):
        load(path)


@pytest.mark.parametrize(
    "damage", [lambda t: t[: len(t) // 2], lambda t: t.replace('"step": 2', '"step": 3'), lambda t: "[]"]
)
def test_a_torn_or_changed_state_is_found_and_the_older_one_offered(tmp_path: Path, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "state.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(
        ValueError, match=r"state.json is missing or damaged; delete .*0002 to go on from .* step-0000001"
    ):
        checkpoint.load_model(path.parent)
    with pytest.raises(ValueError, match=r"0000001/model.safetensors is missing or damaged$"):
        (path.parent.parent / "step-0000001" / "model.safetensors").unlink()
        checkpoint.load_model(path.parent.parent / "step-0000001")


def test_rests_of_killed_saves_and_deletions_are_cleared_by_the_next_save(tmp_path: Path):
    (save(tmp_path, 1) / "state.json").unlink()
    (tmp_path / "checkpoints" / ".step-0000002.tmp").mkdir()
    save(tmp_path, 3)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-0000003"]


def test_best_is_never_a_loss_that_is_no_number(tmp_path: Path):
    for step, loss in ((1, math.nan), (2, 3.0), (3, math.nan), (4, math.inf)):
        save(tmp_path, step, loss)
    assert checkpoint.best(tmp_path).name == "step-0000002"


def test_a_folder_without_its_state_is_no_checkpoint(tmp_path: Path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "state.json").unlink()
    assert checkpoint.latest(tmp_path).name == "step-0000001"


def test_other_shapes_and_unknown_settings_are_refused(tmp_path: Path):
    path = save(tmp_path, 1)
    with pytest.raises(ValueError, match="does not fit the model"):
        checkpoint.load_weights(model(dim=32), path)
    state = json.loads((path / "state.json").read_text())
    state["model"]["magic"] = 1
    (path / "state.json").write_text(json.dumps(checkpoint.sealed(state)))
    with pytest.raises(ValueError, match="magic"):
        checkpoint.load_model(path)
    del state["model"]["magic"], state["model"]["rope"]["theta"]
    (path / "state.json").write_text(json.dumps(checkpoint.sealed(state)))
    with pytest.raises(ValueError, match="theta"):
        checkpoint.load_model(path)


def test_files_load_without_this_repository_and_without_pickle(tmp_path: Path):
    path = save(tmp_path, 1)
    code = (
        "import sys, torch, safetensors.torch as s; p = sys.argv[1];"
        "print(len(s.load_file(p + '/model.safetensors')), torch.load(p + '/optimizer.pt', weights_only=True)['x'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, path], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1)[1].strip() == "[0, 1, 2]"


def test_a_malicious_pickle_is_refused(tmp_path: Path):
    path = save(tmp_path, 1)
    torch.save({"x": Evil(tmp_path / "owned")}, path / "optimizer.pt")
    state = json.loads((path / "state.json").read_text())
    state["sha256"]["optimizer.pt"] = checkpoint._sha256(path / "optimizer.pt")
    (path / "state.json").write_text(json.dumps(checkpoint.sealed(state)))
    with pytest.raises(ValueError, match=r"optimizer.pt holds more than tensors and plain values, so it is not loaded"):
        checkpoint.load_optimizer(path)
    assert not (tmp_path / "owned").exists()


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


def save_sharded(run: Path, parts: dict) -> Path:
    place = checkpoint.begin(run / "checkpoints", 1)
    dcp.save(parts, checkpoint_id=place / checkpoint.SHARDS, no_dist=True)
    torch.save({"random": []}, place / checkpoint.OPTIMIZER)
    return checkpoint.finish(place, model(), {"step": 1, "val_loss": None})


def test_shards_are_checked_and_give_back_the_weights(tmp_path: Path):
    path = save_sharded(tmp_path, {"model": model().state_dict()})
    loaded = checkpoint.load_model(path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model().state_dict().items())
    shard = path / "shards" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing or damaged"):
        checkpoint.load_model(path)


def test_shards_of_another_model_are_refused(tmp_path: Path):
    path = save_sharded(tmp_path, {"model": model(dim=32).state_dict()})
    with pytest.raises(ValueError, match="shards cannot be read into this model"):
        checkpoint.load_model(path)


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_malicious_shards_are_refused(tmp_path: Path, place: str):
    weights = model().state_dict()
    if place == "value":
        weights["norm.weight"] = Evil(tmp_path / "owned")
    path = save_sharded(tmp_path, {"model": weights})
    if place == "metadata":
        (path / "shards" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
        state = json.loads((path / "state.json").read_text())
        state["sha256"]["shards/.metadata"] = checkpoint._sha256(path / "shards" / ".metadata")
        (path / "state.json").write_text(json.dumps(checkpoint.sealed(state)))
    with pytest.raises(
        ValueError, match="mkdir, which no checkpoint needs" if place == "metadata" else "shards cannot"
    ):
        checkpoint.load_model(path)
    assert not (tmp_path / "owned").exists()
