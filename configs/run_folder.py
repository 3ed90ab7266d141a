"""The run folder: whose it is, what is known about the run, and metrics.jsonl, which is the complete record."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from configs.schema import Experiment, SettingsError, to_yaml

# What a resumed run may not change: it would no longer be the same run.
FIXED_ON_RESUME = ("model", "data", "seed", "train.batch_size")
FREE_ON_RESUME = ("data.cache_dir",)
LOCK = ".lock"


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def refuse_other_run(config: Experiment) -> None:
    """SettingsError unless the run folder is new, or is to be resumed and holds the run of these settings."""
    run = config.run_dir
    if not config.resume:
        if run.is_dir() and any(path.name != LOCK for path in run.iterdir()):
            raise SettingsError(
                f"{run} holds a run already: go on with --resume true, or choose another --name or --seed"
            )
        return
    if not (run / "config.yaml").is_file():
        raise SettingsError(f"{run} holds no run to resume: check name and out_dir, or leave out --resume")
    before = flatten(yaml.safe_load((run / "config.yaml").read_text()))
    now = flatten(yaml.safe_load(to_yaml(config)))
    changed = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key.startswith(FIXED_ON_RESUME) and key not in FREE_ON_RESUME and before.get(key) != now.get(key)
    ]
    if changed:
        raise SettingsError(f"{run} cannot be resumed with other settings: {'; '.join(changed)}")


def take(config: Experiment) -> IO:
    """Make the run folder and hold it until the returned file is closed or this process ends, however it ends.

    SettingsError if another process trains in it, or if another run has appeared there.
    """
    run = config.run_dir
    run.mkdir(parents=True, exist_ok=True)
    file = (run / LOCK).open("a")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # Windows has no flock
    except BlockingIOError:
        raise SettingsError(f"{run} is being trained by another process: wait for it, or stop it first") from None
    refuse_other_run(config)
    return file


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_run_json(run: Path, **changes: Any) -> dict[str, Any]:
    """Update run.json, what there is to know about a run besides its settings."""
    path = run / "run.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    values |= changes
    write_atomically(path, json.dumps(values, indent=2) + "\n")
    return values


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
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        os.replace(temporary, path)
        self.file = path.open("a", buffering=1)

    def write(self, values: dict[str, Any]) -> None:
        self.file.write(json.dumps(values) + "\n")
