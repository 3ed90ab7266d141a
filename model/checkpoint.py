"""Checkpoints: written beside and renamed into place, checked on reading, never able to run code.

checkpoints/step-0000500/model.safetensors   the weights
                         optimizer.pt        optimizer and random states
                         state.json          everything else, with checksums of all three

With train.sharded_checkpoints weights and optimizer are in a folder of shards instead: model/sharded.py.
"""

import hashlib
import json
import math
import os
import pickle
import shutil
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from model.config import ModelConfig, ScalingConfig
from model.parallel import spread_like
from model.transformer import Transformer

STATE, WEIGHTS, OPTIMIZER, SHARDS = "state.json", "model.safetensors", "optimizer.pt", "shards"


def save(folder: Path, model: Transformer, optimizer: dict[str, Any], state: dict[str, Any]) -> Path:
    """Write the checkpoint of `state["step"]` into `folder`; it appears whole or not at all.

    Args:
        folder: the run's checkpoint folder.
        model: the bare model, not a compiled or wrapped one.
        optimizer: tensors and plain values to go on from, for torch.load with weights_only.
        state: plain values; must hold `step`.

    Returns its folder. One that is there already for this step is left as it is. OSError if it cannot be written.
    """
    if is_there(folder, state["step"]):
        return _place(folder, state["step"])
    try:
        temporary = begin(folder, state["step"])
        # Contiguous copies on the CPU, so that a checkpoint loads on any machine.
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        safetensors.torch.save_file(weights, temporary / WEIGHTS)
        torch.save(optimizer, temporary / OPTIMIZER)
        return finish(temporary, model, state)
    except Exception as error:  # torch and safetensors have their own kinds for a full disk
        place = _place(folder, state["step"])
        raise OSError(f"cannot write {place}: {str(error).partition(chr(10))[0]}") from error
    finally:
        shutil.rmtree(half_made(folder, state["step"]), ignore_errors=True)


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def is_there(folder: Path, step: int) -> bool:
    """Whether there is a checkpoint of this step."""
    return (_place(folder, step) / STATE).is_file()


def half_made(folder: Path, step: int) -> Path:
    """Where the checkpoint of this step is made."""
    return folder / f".{_place(folder, step).name}.tmp"


def begin(folder: Path, step: int) -> Path:
    """Make the place where a checkpoint is made, and remove what is left of saves and deletions that were killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for rest in (*folder.glob(".step-*.tmp"), *(p for p in folder.glob("step-*") if not (p / STATE).exists())):
        shutil.rmtree(rest)
    temporary = half_made(folder, step)
    temporary.mkdir()
    return temporary


def finish(temporary: Path, model: Transformer, state: dict[str, Any]) -> Path:
    """Describe the files of a half-made checkpoint, get all of it onto the disk, and rename it into place."""
    target = _place(temporary.parent, state["step"])
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    description = {
        **state,
        "model": asdict(model.config),
        "vocab_size": model.vocab_size,
        "sha256": {str(path.relative_to(temporary)): _sha256(path) for path in files},
    }
    (temporary / STATE).write_text(json.dumps(sealed(description), indent=2), encoding="utf-8")
    for path in (*temporary.rglob("*"), temporary):
        _sync(path)
    os.rename(temporary, target)
    _sync(temporary.parent)
    return target


def checkpoints(run: Path) -> list[Path]:
    """All finished checkpoints of a run folder, oldest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if (path / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(run: Path) -> Path:
    """The newest checkpoint; FileNotFoundError if there is none."""
    found = checkpoints(run)
    if not found:
        raise FileNotFoundError(f"{run} holds no checkpoint")
    return found[-1]


def best(run: Path) -> Path | None:
    """The checkpoint of the lowest validation loss, None if no checkpoint was validated."""
    losses = {path: read_state(path).get("val_loss") for path in checkpoints(run)}
    validated = [path for path, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(validated, key=lambda path: losses[path], default=None)


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best one."""
    spared = {*checkpoints(run)[-keep:], best(run)}
    for path in checkpoints(run):
        if path not in spared:
            # state.json goes first: what is left of a deletion cut short is no checkpoint.
            (path / STATE).unlink()
            shutil.rmtree(path)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint; ValueError if it is damaged."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        if state == sealed(state):
            return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise _damaged(checkpoint, STATE)


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with a checksum of all of it under sha256, beside those of the other files."""
    files = {name: digest for name, digest in state["sha256"].items() if name != STATE}
    content = json.dumps({**state, "sha256": files}, sort_keys=True)
    return {**state, "sha256": {**files, STATE: hashlib.sha256(content.encode()).hexdigest()}}


def load_model(
    checkpoint: Path,
    device: str | torch.device = "cpu",
    scaling: ScalingConfig | None = None,
    window: int | None = None,
) -> Transformer:
    """Build the model a checkpoint describes and load its weights, strictly.

    Args:
        scaling: how to stretch its RoPE; its trained length is the checkpoint's unless it says another. None
            leaves the model as it was trained.
        window: how many tokens attention may reach back; None leaves that as it was trained.

    Raises:
        ValueError: the file is damaged or does not hold exactly the weights of the described model, or the
            model has no RoPE to stretch.
    """
    state = read_state(checkpoint)
    config = model_config(state["model"])
    if scaling is not None:
        if scaling.trained_length is None:
            scaling = replace(scaling, trained_length=state["context"])
        config = replace(config, rope=replace(config.rope, scaling=scaling))
    if window is not None:
        config = replace(config, window=window)
    model = Transformer(config, state["vocab_size"])
    load_weights(model, checkpoint)
    return model.to(device)


def load_weights(model: Transformer, checkpoint: Path) -> None:
    """Copy a checkpoint's weights into `model`; ValueError if damaged, or unless names and shapes agree exactly."""
    state = read_state(checkpoint)
    if (checkpoint / SHARDS).is_dir():
        # Imported where it is used: it takes a second.
        from model.sharded import read_weights

        for name in state["sha256"]:
            if name.startswith(f"{SHARDS}/"):
                _check(checkpoint, name, state)
        read_weights(checkpoint / SHARDS, model)
        return
    _check(checkpoint, WEIGHTS, state)
    try:
        model.load_state_dict(safetensors.torch.load_file(checkpoint / WEIGHTS), strict=True)
    except (RuntimeError, safetensors.SafetensorError) as error:
        raise ValueError(f"{checkpoint} does not fit the model: {' '.join(str(error).split())}") from error


def load_optimizer(checkpoint: Path) -> dict[str, Any]:
    """What was saved as `optimizer`; ValueError if the file is damaged."""
    _check(checkpoint, OPTIMIZER, read_state(checkpoint))
    try:
        return torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):
        raise ValueError(
            f"{checkpoint / OPTIMIZER} holds more than tensors and plain values, so it is not loaded"
        ) from None


def restore_optimizers(checkpoint: Path, model: Transformer, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Copy a checkpoint's states into the optimizers of `model`, whole or spread; returns all that load_optimizer does.

    Moments come from the file. Learning rate, decay and betas are settings, and stay those of `optimizers`.
    """
    saved = load_optimizer(checkpoint)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in _groups(optimizers)]
    if (checkpoint / SHARDS).is_dir():
        from model.sharded import read_optimizers

        read_optimizers(checkpoint / SHARDS, model, optimizers)
    else:
        # Runs from before there were several have one.
        for optimizer, own in zip(optimizers, saved.get("optimizers") or [saved["optimizer"]], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            moments = own["state"]
            own["state"] = {n: spread_like(moments[n], p) for n, p in enumerate(parameters) if n in moments}
            optimizer.load_state_dict(own)
    for group, own in zip(_groups(optimizers), settings, strict=True):  # loading has made new groups
        group.update(own)
    return saved


def _groups(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def model_config(values: dict[str, Any], settings: type = ModelConfig) -> Any:
    """Settings of the model from the plain values in state.json; ValueError for unknown or missing ones."""
    parts = {field.name: field.type for field in fields(settings)}
    if values.keys() != parts.keys():
        raise ValueError(
            f"the checkpoint's settings are not those of this version: {', '.join(sorted(values.keys() ^ parts.keys()))}"
        )
    return settings(**{k: model_config(v, parts[k]) if is_dataclass(parts[k]) else v for k, v in values.items()})


def _check(checkpoint: Path, name: str, state: dict[str, Any]) -> None:
    path = checkpoint / name
    if not path.is_file() or _sha256(path) != state["sha256"].get(name):
        raise _damaged(checkpoint, name)


def _damaged(checkpoint: Path, name: str) -> ValueError:
    others = [other.name for other in checkpoints(checkpoint.parent.parent) if other.name < checkpoint.name]
    offer = f"; delete {checkpoint} to go on from the one before, {others[-1]}" if others else ""
    return ValueError(f"{checkpoint / name} is missing or damaged{offer}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
