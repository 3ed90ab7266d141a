"""The run folder: whose it is, what is known about the run, and metrics.jsonl, which is the complete record."""

import fcntl
import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from configs.schema import Experiment, ModelOverride, SettingsError, to_yaml
from data.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from model.transformer import Transformer

# What a resumed run may not change: it would no longer be the same run.
FIXED_ON_RESUME = ("model", "data", "seed", "train.batch_size")
# What says where things lie and changes no number.
PLACES = ("data.cache_dir", "out_dir", "name", "resume")


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def refuse_other_run(config: Experiment) -> list[str]:
    """SettingsError unless the run folder is new, or is to be resumed and holds the run of these settings.

    Returns what a resumed run does change, such as its number of steps.
    """
    run = config.run_dir
    if not config.resume:
        # Hidden files are what is left of a start that was killed before it wrote anything whole.
        if run.is_dir() and any(not path.name.startswith(".") for path in run.iterdir()):
            raise SettingsError(
                f"{run} holds a run already: go on with --resume true, or choose another --name or --seed"
            )
        return []
    if not (run / "config.yaml").is_file():
        raise SettingsError(f"{run} holds no run to resume: check name and out_dir, or leave out --resume")
    before = flatten(yaml.safe_load((run / "config.yaml").read_text()))
    now = flatten(yaml.safe_load(to_yaml(config)))
    changed = {
        key: f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in PLACES and before.get(key) != now.get(key)
    }
    if refused := [change for key, change in changed.items() if key.startswith(FIXED_ON_RESUME)]:
        raise SettingsError(f"{run} cannot be resumed with other settings: {'; '.join(refused)}")
    return list(changed.values())


class Hold:
    """The run folder, made if needed and held for one process until this object is gone or the process has ended.

    SettingsError if another process trains in it.
    """

    def __init__(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(run, os.O_RDONLY)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"{run} is being trained by another process: wait for it, or stop it first") from None

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


def open_model(
    name: str, override: ModelOverride, device: "str | torch.device" = "cpu"
) -> tuple[Path, dict[str, Any], "Tokenizer", "Transformer"]:
    """Checkpoint, state, tokenizer and model of a run folder's newest checkpoint, or of the checkpoint of that name.

    FileNotFoundError if there is none; ValueError if it is damaged or its tokenizer is not the one it was trained with.
    """
    from model import checkpoint

    path = Path(name)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist: give a run folder such as runs/small-rope")
    path = path if (path / checkpoint.STATE).is_file() else checkpoint.latest(path)
    state, file = checkpoint.read_state(path), path.resolve().parent.parent / "tokenizer.json"
    tokenizer = load_tokenizer(file)
    if fingerprint(tokenizer) != state["tokenizer_sha256"]:
        raise ValueError(f"{file} is not the tokenizer that {path} was trained with")
    scaling = None if override.rope.scaling.kind == "none" else override.rope.scaling
    return path, state, tokenizer, checkpoint.load_model(path, device, scaling, override.window)


def refuse_used(folder: Path) -> None:
    """SettingsError if there is something where a new folder is to be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder} exists and is not empty: choose another name")


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def cut_samples(path: Path, step: int) -> None:
    """Drop the samples that were written after `step`: the resumed run writes them again."""
    if path.exists():
        parts = re.split(r"^(?=--- step \d+$)", path.read_text(encoding="utf-8"), flags=re.M)
        write_atomically(path, "".join(part for part in parts if part and int(part.split()[2]) <= step))


def write_run_json(run: Path, **changes: Any) -> dict[str, Any]:
    """Update run.json, what there is to know about a run besides its settings."""
    values = read_run_json(run) | changes
    write_atomically(run / "run.json", json.dumps(values, indent=2) + "\n")
    return values


def read_run_json(run: Path) -> dict[str, Any]:
    """run.json, or nothing if it is not there."""
    path = run / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def describe_machine(device: str) -> dict[str, Any]:
    """Code, versions and machine, for run.json."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    return {
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain")),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "device": device,
    }


class Metrics:
    """metrics.jsonl: one JSON object a line, each with `step` and `tokens`.

    Args:
        path: the file; created if missing.
        resume_step: lines past this step are dropped, since the resumed run makes them again.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = []
        self.last_step = 0
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                step = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError):
                continue  # the last line of a killed run may be torn
            self.last_step = max(self.last_step, step)
            if step <= resume_step:
                kept.append(line + "\n")
        write_atomically(path, "".join(kept))
        # Unbuffered: a line is written whole when it is made, and nothing is left to be flushed on a full disk.
        self.file = path.open("ab", buffering=0)

    def write(self, values: dict[str, Any]) -> None:
        line = json.dumps(values).encode() + b"\n"
        if self.file.write(line) != len(line):
            raise OSError(f"cannot write {self.file.name}: the disk is full")

    def sync(self) -> None:
        """Wait until all lines are on the disk, so that no checkpoint is newer than its metrics."""
        os.fsync(self.file.fileno())
