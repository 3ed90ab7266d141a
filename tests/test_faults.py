"""Signals, full disks, changed settings, numbers that are none, secrets, and a broken wandb: real runs, as a user sees them."""

import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_program
from test_train import assert_same_run, go, losses

from model import checkpoint


def rests(folder: Path) -> list[Path]:
    """What unfinished writing would leave behind."""
    return [
        path for path in folder.rglob("*") if path.name.endswith(".tmp") or path.name.startswith((".step", ".files"))
    ]


def points(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def one_line(done: subprocess.CompletedProcess, code: int, *words: str) -> str:
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), done.stderr
    return done.stderr


# --- signals


def train_until(settings: list[str], moment: Callable[[], bool], *signals: int) -> tuple[int, str]:
    """Start training, send the signals once `moment` has come, and return exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not moment():
        time.sleep(0.001)
    assert process.poll() is None, process.stderr.read()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    _, error = process.communicate(timeout=60)
    return process.returncode, error


def has_step(run: Path, step: int) -> Callable[[], bool]:
    return lambda: (run / "metrics.jsonl").exists() and f'"step": {step},' in (run / "metrics.jsonl").read_text()


@pytest.fixture
def slow_evaluation(small_run: list[str]) -> list[str]:
    """A run whose validation after step 5 and whose length curve at the end take a second or more each."""
    return [
        *small_run, "--train.steps=10", "--eval.every=5", "--eval.windows=300", "--eval.batch_tokens=32", "--eval.sample_tokens=0",
        "--eval.length_targets=100", "--eval.length_block=1",
    ]  # fmt: skip


def test_a_signal_during_preparation_stops_at_once_and_leaves_nothing(small_run: list[str], tmp_path: Path):
    cache = tmp_path / "cache"
    settings = [*small_run, f"--data.cache_dir={cache}"]
    code, error = train_until(settings, lambda: any(map(Path.is_dir, cache.glob(".files-*"))), signal.SIGINT)
    assert (code, error) == (130, "")
    assert list(cache.iterdir()) == [] and not (tmp_path / "runs").exists()


def test_a_signal_during_evaluation_is_obeyed_after_it(slow_evaluation: list[str], tmp_path: Path):
    run = tmp_path / "runs" / "run"
    code, error = train_until(slow_evaluation, has_step(run, 5), signal.SIGTERM)
    assert code == 143 and error == "stopped at step 5, saved; go on with --resume true\n"
    assert [p.name for p in checkpoint.checkpoints(run)] == ["step-0000005"] and "val/loss" in points(run)[-1]
    assert_same_run(go(slow_evaluation, "--name=unbroken"), go(slow_evaluation, "--resume=true"))


def test_a_second_signal_stops_at_once_and_the_last_checkpoint_is_whole(slow_evaluation: list[str], tmp_path: Path):
    run = tmp_path / "runs" / "run"
    settings = [*slow_evaluation, "--train.save_every=2"]
    code, _ = train_until(settings, has_step(run, 5), signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert checkpoint.latest(run).name == "step-0000004" and rests(run) == []
    assert_same_run(go(slow_evaluation, "--name=unbroken"), go(settings, "--resume=true"))


def test_a_signal_during_a_save_is_obeyed_after_it(small_run: list[str], tmp_path: Path):
    run = tmp_path / "runs" / "run"
    settings = [*small_run, "--train.save_every=1", "--train.steps=400"]
    code, error = train_until(settings, lambda: any((run / "checkpoints").glob(".step-*.tmp")), signal.SIGTERM)
    step = checkpoint.read_state(checkpoint.latest(run))["step"]
    assert code == 143 and error == f"stopped at step {step}, saved; go on with --resume true\n" and rests(run) == []


def test_a_signal_during_the_length_curve_loses_no_step(slow_evaluation: list[str], tmp_path: Path):
    run = tmp_path / "runs" / "run"
    code, error = train_until(slow_evaluation, lambda: (run / "checkpoints" / "step-0000010").exists(), signal.SIGINT)
    # Between the last save and the curve a signal is still noted, and said.
    assert code == 130 and error in ("", "stopped at step 10, saved; go on with --resume true\n")
    assert not (run / "lengths.json").exists()
    done = run_program("train.py", *slow_evaluation, "--resume=true")
    assert done.returncode == 0 and (run / "lengths.json").exists()
    assert_same_run(go(slow_evaluation, "--name=unbroken"), run)


# --- disks


def limited(settings: list[str], size: int) -> subprocess.CompletedProcess:
    """Train while no file may grow past `size` bytes: every write beyond fails, as on a full disk."""
    return subprocess.run(
        [sys.executable, ROOT / "train.py", *settings], capture_output=True, text=True, stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )  # fmt: skip


def test_a_failing_write_of_a_checkpoint_keeps_the_one_before(small_run: list[str], tmp_path: Path):
    settings = [*small_run, "--train.schedule=wsd", "--train.decay_fraction=0"]
    run = go(settings, "--train.steps=10")
    done = limited([*settings, "--resume=true"], 50_000)
    one_line(
        done, 1, "after step 20", "cannot write", "step-0000020", "the last good checkpoint is", "step-0000010",
        f"make room for {run}", f"--config {run}/config.yaml --resume true",
    )  # fmt: skip
    assert rests(run) == [] and checkpoint.latest(run).name == "step-0000010"
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert_same_run(go(settings, "--resume=true"), go(settings, "--name=unbroken"))


def test_a_failing_write_of_metrics_stops_with_a_whole_file(small_run: list[str], tmp_path: Path):
    settings = [
        *small_run,
        "--model.n_layers=1",
        "--model.dim=8",
        "--model.n_heads=2",
        "--model.ffn_dim=16",
        "--train.steps=400",
        "--train.save_every=100",
    ]
    done = limited(settings, 64_000)
    run = tmp_path / "runs" / "run"
    error = one_line(done, 1, "metrics.jsonl", "the last good checkpoint is")
    assert rests(run) == []
    last = int(re.search(r"after step (\d+)", error)[1])
    assert 200 < last < 400 and checkpoint.latest(run).name == f"step-0000{last // 100}00"
    assert_same_run(go(settings, "--resume=true"), go(settings, "--name=unbroken"))


@pytest.mark.parametrize("size, file", [(3_000, "tokenizer"), (15_000, "shard")])
def test_a_failing_write_of_prepared_data_leaves_nothing(small_run: list[str], tmp_path: Path, size: int, file: str):
    cache = tmp_path / "cache"
    settings = [*small_run, f"--data.cache_dir={cache}"]
    one_line(limited(settings, size), 1, "cannot write", str(cache), "data.cache_dir")
    assert list(cache.iterdir()) == [] and not (tmp_path / "runs").exists()
    assert go(settings).is_dir()


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_loses_nothing_and_the_run_goes_on_when_there_is_room(small_run: list[str], small_disk: Path):
    settings = [*small_run, f"--out_dir={small_disk}", "--train.save_every=2", "--train.keep_checkpoints=10"]
    run = small_disk / "run"
    one_line(
        run_program("train.py", *settings),
        1,
        "No space left on device",
        "the last good checkpoint is",
        f"make room for {run}",
    )
    assert rests(run) == []
    checkpoint.load_model(checkpoint.latest(run))
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    assert_same_run(go(settings, "--resume=true"), go(settings, "--name=unbroken"))


# --- resuming with other settings


def test_settings_that_change_are_printed_recorded_and_win_over_the_file(small_run: list[str]):
    run = go(small_run, "--train.steps=10", "--train.learning_rate=1e-2")
    changed = ["--train.steps=12", "--train.learning_rate=1e-3", "--train.weight_decay=0.3", "--train.beta2=0.9"]
    done = run_program("train.py", *small_run, "--resume=true", *changed)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("changed since"))
    (record,) = json.loads((run / "run.json").read_text())["changes"]
    assert (
        record["step"] == 10 and len(record["settings"]) == 4 and all(change in line for change in record["settings"])
    )
    assert "train.learning_rate was 0.01 and is 0.001" in record["settings"] and "train.steps was 10 and is 12" in line
    # By hand: the last of 12 steps of a cosine after 2 of warm-up.
    assert points(run)[-2]["train/lr"] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 10 / 11)), rel=1e-4)
    groups = checkpoint.load_optimizer(checkpoint.latest(run))["optimizers"][0]["param_groups"]
    assert groups[0]["weight_decay"] == 0.3 and groups[0]["betas"] == (0.9, 0.9)


def test_a_finished_run_says_so_and_is_left_as_it_is(small_run: list[str]):
    run = go(small_run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = run_program("train.py", *small_run, "--resume=true")
    assert (
        done.returncode == 0
        and done.stdout == f"{run} is finished at step 20: nothing to do; --train.steps with a higher value goes on\n"
    )
    one_line(
        run_program("train.py", *small_run, "--resume=true", "--train.steps=15"),
        2,
        "has 20 steps already",
        "train.steps 15",
    )
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_other_accumulation_goes_on_with_the_same_batches(small_run: list[str]):
    unbroken = go(small_run, "--name=unbroken")
    run = go(small_run, "--train.steps=10", "--train.schedule=wsd", "--train.decay_fraction=0")
    whole = go(small_run, "--name=whole", "--train.schedule=wsd", "--train.decay_fraction=0")
    go(small_run, "--resume=true", "--train.schedule=wsd", "--train.decay_fraction=0", "--train.micro_batch_size=2")
    assert list(losses(run).values()) == pytest.approx(list(losses(whole).values()), abs=1e-4)
    assert losses(unbroken)[1] == losses(whole)[1]


def test_a_changed_data_file_is_other_data(small_run: list[str], tmp_path: Path, text_folder: Path):
    texts = tmp_path / "texts"
    shutil.copytree(text_folder, texts)
    settings = [*small_run, f"--data.path={texts}"]
    run = go(settings, "--train.steps=2")
    before = (run / "metrics.jsonl").read_bytes()
    (texts / "03.txt").write_text("Something else. " * 300)
    one_line(run_program("train.py", *settings, "--resume=true"), 2, f"{run} was trained on other data")
    assert (run / "metrics.jsonl").read_bytes() == before


# --- numbers that are none


def test_divergence_names_the_step_the_checkpoint_and_a_command_that_works(small_run: list[str]):
    run = go(small_run, "--train.steps=10")
    done = run_program("train.py", *small_run, "--resume=true", "--train.learning_rate=1e30", "--train.grad_clip=1e30")
    error = one_line(done, 1, "step 12: loss is", "norm is nan", "the last good checkpoint is", "step-0000010")
    assert all("train/grad_norm" in p for p in points(run) if "train/loss" in p)
    assert checkpoint.best(run).name == "step-0000010"
    command = re.search(r"python (train.py .*)$", error.strip())[1].replace("LOWER", "1e-3")
    again = run_program(*command.split(), "--train.grad_clip=1")
    assert again.returncode == 0, again.stderr
    assert list(losses(run)) == list(range(1, 21))


def test_weights_that_are_no_numbers_stop_at_the_first_step(small_run: list[str]):
    base = go(small_run, "--train.steps=2", "--name=base")
    path = checkpoint.latest(base)
    model = checkpoint.load_model(path)
    with torch.no_grad():
        model.norm.weight[0] = torch.inf
    state = checkpoint.read_state(path)
    checkpoint.save(base / "checkpoints", model, checkpoint.load_optimizer(path), {**state, "step": 3})
    done = run_program("train.py", *small_run, f"--init_from={base}")
    one_line(done, 1, "step 1: loss is nan", "no checkpoint was made yet")


# --- strangers and secrets


def test_a_malicious_pickle_in_a_run_folder_runs_nothing(small_run: list[str], tmp_path: Path):
    class Evil:
        def __reduce__(self) -> tuple:
            return (os.mkdir, (str(tmp_path / "owned"),))

    run = go(small_run, "--train.steps=2")
    path = checkpoint.latest(run)
    for name in ("model.safetensors", "optimizer.pt"):
        torch.save({"x": Evil()}, path / name)
        state = json.loads((path / "state.json").read_text())
        state["sha256"][name] = checkpoint._sha256(path / name)
        (path / "state.json").write_text(json.dumps(checkpoint.sealed(state)))
        one_line(run_program("train.py", *small_run, "--resume=true"), 2, f"{path}")
    one_line(run_program("scripts/generate.py", run), 2, f"{path}")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/b", "..", ".hidden", "a\\b"])
def test_no_name_leads_out_of_the_output_folder(small_run: list[str], tmp_path: Path, name: str):
    before = set(tmp_path.rglob("*"))
    one_line(run_program("train.py", *small_run, f"--name={name}"), 2, "name is")
    group = [flag for flag in small_run if not flag.startswith("--name")]
    one_line(run_program("train.py", *group, f"--tracking.group={name}"), 2, "name is")
    assert set(tmp_path.rglob("*")) == before


def test_secrets_of_the_environment_are_written_nowhere(small_run: list[str], tmp_path: Path):
    key = "5ec7e7" * 6 + "abcd"
    secrets = {"WANDB_API_KEY": key, "HF_TOKEN": "hf_" + key, "AWS_SECRET_ACCESS_KEY": "aws" + key}
    done = run_program("train.py", *small_run, "--tracking.mode=offline", **secrets)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if key.encode() in path.read_bytes()] and key not in done.stdout + done.stderr


# --- wandb

BROKEN_WANDB = """
import wandb
real = wandb.sdk.wandb_run.Run.log
def log(self, values, *rest, **more):
    if values.get("step", 0) >= 3:
        raise ConnectionError("the network is unreachable")
    return real(self, values, *rest, **more)
wandb.sdk.wandb_run.Run.log = log
"""


def test_a_log_that_raises_from_step_3_on_stops_nothing(small_run: list[str], tmp_path: Path):
    (tmp_path / "usercustomize.py").write_text(textwrap.dedent(BROKEN_WANDB))
    done = run_program(
        "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import usercustomize, train; train.main(sys.argv[1:])",
        *small_run, "--tracking.mode=offline",
    )  # fmt: skip
    assert done.returncode == 0
    assert (
        done.stderr
        == "warning: wandb failed (the network is unreachable); training goes on and metrics.jsonl stays complete\n"
    )
    assert [p["step"] for p in points(tmp_path / "runs/run") if "train/loss" in p] == list(range(1, 21))


def test_no_network_means_offline_after_one_line(small_run: list[str], tmp_path: Path):
    done = run_program(
        "train.py", *small_run, "--tracking.mode=online",
        WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_MODE="", HTTP_PROXY="", HTTPS_PROXY="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        "warning: wandb does not start in mode online" in done.stderr and "wandb is offline: look with" in done.stdout
    )
    assert [p["step"] for p in points(tmp_path / "runs/run") if "train/loss" in p] == list(range(1, 21))


@pytest.mark.slow
def test_an_id_that_exists_and_offline_resumes_keep_one_continuous_record(small_run: list[str], tmp_path: Path):
    settings = [*small_run, "--tracking.mode=offline"]
    run = tmp_path / "runs" / "run"
    # Never inside the tests' own process: its wandb service would be inherited by every later run.
    assert run_program("train.py", *settings, "--train.steps=5").returncode == 0
    first = json.loads((run / "run.json").read_text())["wandb_id"]
    for steps in (10, 20):
        done = run_program("train.py", *settings, f"--train.steps={steps}", "--resume=true", WANDB_RUN_ID=first)
        assert done.returncode == 0 and done.stderr == ""
    steps = [p["step"] for p in points(run) if "train/loss" in p]
    assert steps == list(range(1, 21)) and all(a <= b for a, b in itertools.pairwise(p["step"] for p in points(run)))
    assert json.loads((run / "run.json").read_text())["wandb_id"] == first
    assert run_program("train.py", *settings, "--name=other").returncode == 0
    assert json.loads((tmp_path / "runs" / "other" / "run.json").read_text())["wandb_id"] != first
