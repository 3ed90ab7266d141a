"""torch.compile takes the whole model as one graph, for every encoding and every way of stretching."""

import json
from pathlib import Path

import pytest
from compile_all import CASES
from conftest import ROOT, run_program
from safetensors.torch import load_file


def test_compiled_equals_eager_for_every_encoding():
    done = run_program("tests/compile_all.py")
    assert done.returncode == 0, done.stderr[-2000:]
    differences = [line.split() for line in done.stdout.splitlines()]
    assert [(position, kind) for position, kind, _ in differences] == CASES
    assert all(float(size) < 1e-5 for *_, size in differences), done.stdout


# Compiled, then not, then compiled again, each going on with the last; the backend only traces, which is quicker.
# Then the real one, where there is no C++ compiler; and the same without being asked to compile.
LEGS = """
import functools, sys, torch, train
real, torch.compile = torch.compile, functools.partial(torch.compile, backend="eager")
for more in (["--train.steps=2"], ["--train.steps=4", "--resume=true", "--train.compile=false"], ["--resume=true"]):
    train.main([*sys.argv[1:], *more])
torch.compiler.reset()
torch.compile = real
train.main([*sys.argv[1:], "--name=no-compiler"])
train.main([*sys.argv[1:], "--name=plain", "--train.compile=false"])
"""


def test_compiled_and_plain_runs_go_on_with_each_other_and_without_a_compiler(small_run: list[str], tmp_path: Path):
    """A compiled model's own names, `_orig_mod.`, are in no checkpoint; where nothing can be compiled, training goes on."""
    settings = [
        *small_run, "--train.compile=true", "--train.steps=6", "--model.n_layers=1", "--eval.length_ratios=[0.5]",
        "--train.schedule=wsd", "--train.decay_fraction=0",
    ]  # fmt: skip
    done = run_program(
        "-c", LEGS, *settings, cwd=ROOT, CXX="/nowhere/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "compiled")
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("warning: torch.compile fails (") and "No working C++ compiler" in done.stderr
    losses = {}
    for name in ("run", "no-compiler", "plain"):
        run = tmp_path / "runs" / name
        points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [point["train/loss"] for point in points if "train/loss" in point]
        names = load_file(run / "checkpoints/step-0000006/model.safetensors").keys()
        assert "embedding.weight" in names and not any("_orig_mod" in key for key in names)
    assert losses["no-compiler"] == losses["plain"] and len(losses["plain"]) == 6
    # RoPE has another form for compilers, which rounds otherwise.
    assert losses["run"] == pytest.approx(losses["plain"], abs=1e-4)
