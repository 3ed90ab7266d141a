"""SIGKILL at chosen and at random moments of a real run, resumed every time: it ends bit for bit as if unbroken.

Ten kills by default; `make torture` sends a hundred.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import ROOT
from test_train import assert_same_run

from model import checkpoint

KILLS = int(os.environ.get("KILLS", "10"))
# Share of the kills in each phase. Preparation comes first and the end of the run last; the others are mixed.
PHASES = {"preparation": 0.1, "start": 0.1, "step": 0.3, "evaluation": 0.1, "checkpoint": 0.3, "end": 0.1}


def plan(rng: random.Random) -> list[str]:
    """The phase of every kill, at least one of each."""
    counts = {phase: max(1, round(share * KILLS)) for phase, share in PHASES.items()}
    counts["step"] += KILLS - sum(counts.values())
    middle = [phase for phase in ("start", "step", "evaluation", "checkpoint") for _ in range(counts[phase])]
    rng.shuffle(middle)
    return ["preparation"] * counts["preparation"] + middle + ["end"] * counts["end"]


def test_killed_at_any_moment_a_run_ends_as_if_unbroken(small_run: list[str], tmp_path: Path):
    rng = random.Random(0)
    cache, run = tmp_path / "cache", tmp_path / "runs" / "run"
    phases = plan(rng)
    # Between two kills a run gets at most a few saves further, so it cannot end too early.
    steps = 12 * (len(phases) + 1)
    settings = [
        *small_run, f"--data.cache_dir={cache}", f"--train.steps={steps}", "--train.save_every=3", "--train.log_every=2",
        "--eval.every=9", "--eval.windows=64", "--model.dropout=0.1",
    ]  # fmt: skip
    train = [sys.executable, ROOT / "train.py", *settings]
    subprocess.run([*train, "--name=unbroken"], check=True, capture_output=True)

    def saved() -> int:
        found = checkpoint.checkpoints(run)
        return int(found[-1].name.removeprefix("step-")) if found else 0

    def lines() -> int:
        return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0

    def moment(phase: str) -> Callable[[], bool]:
        """What to wait for; a short random pause follows."""
        more, before, started = rng.randint(1, 3), (saved(), lines()), time.time()
        return {
            "preparation": lambda: any(cache.glob(".files-*")),
            "start": lambda: (run / "config.yaml").exists(),
            "step": lambda: lines() > before[1] + more,
            "evaluation": lambda: lines() > before[1] and saved() > before[0] and saved() % 9 == 0,
            "checkpoint": lambda: (
                saved() >= before[0] + 3 * (more - 1) and any((run / "checkpoints").glob(".step-*.tmp"))
            ),
            # Once this process, and not the one before, has written run.json.
            "end": lambda: saved() == steps and (run / "run.json").stat().st_mtime > started,
        }[phase]

    killed: Counter[str] = Counter()
    lost = 0
    for number, phase in enumerate(phases):
        if phase == "preparation":
            shutil.rmtree(cache, ignore_errors=True)
            cache.mkdir()
        come, before = moment(phase), saved()
        resume = ["--resume=true"] if (run / "config.yaml").exists() else []
        process = subprocess.Popen([*train, *resume], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None and not come():
            time.sleep(0.0003)
        time.sleep(rng.uniform(0, 0.3 if phase == "end" else 0.02))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed[phase] += 1
        output = process.communicate()[0]
        assert process.returncode in (0, -signal.SIGKILL), output
        lost += f"resuming {run} from step {before}\n" not in output if before and "resuming" in output else 0
        print(f"kill {number + 1}/{len(phases)} during {phase}: step {before} -> {saved()}", flush=True)
    done = subprocess.run([*train, "--resume=true"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    unbroken = tmp_path / "runs" / "unbroken"
    assert_same_run(unbroken, run)
    first, second = (checkpoint.load_optimizer(checkpoint.latest(path)) for path in (unbroken, run))
    assert torch.equal(first["random"][0]["cpu"], second["random"][0]["cpu"])
    for one, two in zip(
        first["optimizers"][0]["state"].values(), second["optimizers"][0]["state"].values(), strict=True
    ):
        assert all(torch.equal(one[name], two[name]) for name in one)
    speed = "train/tokens_per_second"
    records = [
        [
            {k: v for k, v in json.loads(line).items() if k != speed}
            for line in (p / "metrics.jsonl").read_text().splitlines()
        ]
        for p in (unbroken, run)
    ]
    assert records[0] == records[1]
    for name in ("lengths.json", "samples.txt"):
        assert (unbroken / name).read_text() == (run / name).read_text()
    rests = [path for path in tmp_path.rglob(".*") if path.name.endswith(".tmp") or path.parent == cache]
    assert rests == [] and lost == 0
    print(f"{sum(killed.values())} kills ({dict(killed)}), {lost} lost, weights, optimizer and losses bit-identical")
    assert sum(killed.values()) >= 0.9 * KILLS and all(killed[phase] for phase in PHASES)
