"""Several processes are one run: real torchrun, real gloo, real SIGKILL."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_program
from safetensors.torch import load_file

STEPS = 20


def command(processes: int, arguments: list[str], *torchrun: str) -> list[str]:
    """As a user types it; one process without torchrun."""
    if processes == 1:
        return [sys.executable, "train.py", *arguments]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *torchrun]
    return [*start, "train.py", *arguments]


def go(processes: int, arguments: list[str], *more: str, expect: int = 0) -> subprocess.CompletedProcess:
    done = run_program(*command(processes, [*arguments, *more])[1:])
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def points(run: Path, key: str = "train/loss") -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({(line["step"], *line) for line in lines}) == len(lines), "a line was written twice"
    return {line["step"]: line[key] for line in lines if key in line}


def assert_close(a: Path, b: Path, tolerance: float = 1e-5) -> None:
    for key in ("train/loss", "val/loss"):
        one, other = points(a, key), points(b, key)
        assert one.keys() == other.keys() and one
        assert list(one.values()) == pytest.approx(list(other.values()), abs=tolerance), key


@pytest.fixture(scope="module")
def settings(settings_of_tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*settings_of_tiny_run, f"--out_dir={tmp_path_factory.mktemp('runs')}"]


@pytest.fixture(scope="module")
def runs(settings: list[str]) -> dict[str, Path]:
    """The same 20 steps by one process, by two with ddp and by two with fsdp."""
    out = Path(settings[-1].partition("=")[2])
    for name, processes in (("one", 1), ("ddp", 2), ("fsdp", 2)):
        parallel = "auto" if name == "one" else name
        done = go(processes, settings, f"--name={name}", f"--train.parallel={parallel}")
        assert done.stdout.count("nats/token") == go_prints, done.stdout
    return {name: out / name for name in ("one", "ddp", "fsdp")}
