"""Weights & Biases in offline mode, for real, read back with its own tool; and metrics.jsonl without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_program

from configs.run_folder import Metrics
from configs.tracking import TrackingConfig, Wandb

WANDB = Path(sys.executable).parent / "wandb"


def inspect(run: Path, *flags: str) -> list[dict]:
    done = subprocess.run(
        [WANDB, "leet", "inspect", *flags, "--json", run / "wandb"], capture_output=True, text=True, check=True
    )
    return (
        json.loads(f"[{done.stdout}]")
        if "--summary" in flags
        else [json.loads(line) for line in done.stdout.splitlines()]
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> tuple[Path, subprocess.CompletedProcess]:
    """A run without an account and without a terminal, as a user starts it."""
    folder = tmp_path_factory.mktemp("tracking")
    done = run_program(
        "train.py", "--config=tiny.yaml", "--data.source=files", f"--data.path={text_folder}", "--data.limit=null",
        "--data.vocab_size=300", f"--data.cache_dir={folder / 'cache'}", f"--out_dir={folder}", "--train.steps=20",
        "--train.log_every=5", "--eval.every=10", "--eval.length_targets=64", "--tracking.tags=[mine]",
        WANDB_MODE="", HOME=str(folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "tiny-rope", done


def test_no_account_means_offline_and_says_how_to_look(run):
    folder, done = run
    assert f"wandb leet {folder}/wandb" in done.stdout and "wandb sync" in done.stdout
    assert done.stderr == ""


def test_summary_shows_group_config_losses_and_length_points(run):
    (summary,) = inspect(run[0], "--summary")
    assert summary["project"] == "ropewalk" and summary["name"] == "tiny-rope-s0" and summary["state"] == "finished"
    assert {"rope", "tiny", "mine"} <= set(summary["tags"])
    config = summary["config"]
    assert (
        config["tracking"]["group"] == "tiny"
        and config["model"]["position"] == "rope"
        and config["parameters"] > 30_000
    )
    values = summary["summary"]
    assert {
        "train/loss",
        "val/loss",
        "val/bits_per_byte",
        "train/grad_norm",
        "samples",
        "length/curve",
    } <= values.keys()
    lengths = json.loads((run[0] / "lengths.json").read_text())
    for row in lengths["by_context"]:
        assert values[f"length/loss_at_{row['context']}"] == pytest.approx(row["loss"])


def test_points_have_their_axes(run):
    records = inspect(run[0])
    (started,) = [r["run"] for r in records if r["type"] == "run"]
    assert started["run_group"] == "tiny"
    axes = {
        m.get("glob_name") or m["name"]: m.get("step_metric")
        for m in (r["metric"] for r in records if r["type"] == "metric")
    }
    assert axes["*"] == "tokens" and axes["length/*"] == "length/context"
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    for key in ("train/loss", "val/loss"):
        points = [item for item in history if key in item]
        assert points and all(item["tokens"] == item["step"] * 128 for item in points)
        assert [p["step"] for p in points] == ([5, 10, 15, 20] if key == "train/loss" else [10, 20])
    lengths = [(item["length/context"], item["length/loss"]) for item in history if "length/loss" in item]
    assert [context for context, _ in lengths] == [8, 16, 32, 48, 64, 128, 256, 512]


def test_resuming_goes_on_with_the_same_wandb_run(run, tmp_path: Path):
    folder, _ = run
    done = run_program(ROOT / "train.py", "--config", folder / "config.yaml", "--resume=true", "--train.steps=25")
    assert done.returncode == 0, done.stderr
    segments = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(segments) == 2 and len({s.name.rpartition("-")[2] for s in segments}) == 1
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == 25


class Broken:
    """A run of wandb whose network is gone from the third point on."""

    def __init__(self) -> None:
        self.points: list[dict] = []

    def log(self, values: dict) -> None:
        if len(self.points) == 2:
            raise ConnectionError("network is unreachable")
        self.points.append(values)

    def finish(self, exit_code: int) -> None:
        self.points.append({"finished": exit_code})


def tracker(tmp_path: Path, logged_step: int = 0) -> Wandb:
    made = Wandb(TrackingConfig(mode="disabled"), tmp_path, "n", "id", {}, [], logged_step)
    made.run = Broken()
    return made


def test_a_failure_of_wandb_is_said_once_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    made = tracker(tmp_path)
    broken = made.run
    for step in range(1, 6):
        made.log({"step": step})
    made.finish()
    assert [p["step"] for p in broken.points] == [1, 2]
    assert capsys.readouterr().err.count("training goes on") == 1


def test_steps_never_go_back_after_a_resume(tmp_path: Path):
    made = tracker(tmp_path, logged_step=7)
    broken = made.run
    for step in (6, 7, 8):
        made.log({"step": step})
    made.log({"length/context": 32})
    assert broken.points == [{"step": 8}, {"length/context": 32}]


def test_metrics_of_steps_that_are_made_again_are_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5, "a": 1}\n{"step": 10}\n{"step": 12}\n{"step": 1')  # killed while writing
    metrics = Metrics(path, resume_step=10)
    assert metrics.last_step == 12
    metrics.write({"step": 11})
    assert path.read_text() == '{"step": 5, "a": 1}\n{"step": 10}\n{"step": 11}\n'
