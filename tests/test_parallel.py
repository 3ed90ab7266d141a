"""Several processes are one run: real torchrun, real gloo, real SIGKILL."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, run_program

from data.batches import TrainingOrder
from model import checkpoint
from model.parallel import Team


def torchrun(processes: int, *options: str) -> list[str]:
    """Arguments of Python that start so many processes; one needs no torchrun."""
    if processes == 1:
        return ["train.py"]
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*start, *options, "train.py"]


# Without it a restarted group can find the addresses of the one before: https://github.com/pytorch/pytorch/issues/135712
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def go(processes: int, arguments: list[str], *more: str, expect: int = 0) -> subprocess.CompletedProcess:
    done = run_program(*torchrun(processes), *arguments, *more)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def points(run: Path, key: str = "train/loss") -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({(line["step"], *line) for line in lines}) == len(lines), "a line was written twice"
    return {line["step"]: line[key] for line in lines if key in line}


def assert_same_curve(a: Path, b: Path) -> None:
    assert_same_points(a, b, "train/loss", "val/loss")


def assert_same_points(a: Path, b: Path, *keys: str) -> None:
    for key in keys:
        one, other = points(a, key), points(b, key)
        assert one.keys() == other.keys() and one
        assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-5), key


@pytest.fixture(scope="module")
def arguments(small_settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("runs")
    return [
        *small_settings,
        "--train.micro_batch_size=1",
        "--train.save_every=10",
        "--eval.every=10",
        f"--out_dir={out}",
    ]


# Flags of the kinds of runs; one is a single process, the others two.
KINDS = {
    "one": ["--train.parallel=ddp"],
    "ddp": ["--train.parallel=ddp"],
    "fsdp": ["--train.parallel=fsdp"],
    "sharded": ["--train.parallel=fsdp", "--train.sharded_checkpoints=true"],
}
Run = Callable[[str], Path]


@pytest.fixture(scope="module")
def run_of(arguments: list[str]) -> Run:
    """The folder of the same 20 steps, with two checkpoints, by a kind of run."""
    out = Path(arguments[-1].partition("=")[2])

    @cache
    def folder(kind: str) -> Path:
        tracking = [] if kind == "one" else ["--tracking.mode=offline"]
        done = go(1 if kind == "one" else 2, arguments, f"--name={kind}", *KINDS[kind], *tracking)
        assert done.stdout.count("bits/byte on held-out text") == 1, "one process alone speaks"
        shape = "4 x 1" if kind == "one" else "2 processes x 2 x 1"
        assert f"step: 128 tokens = {shape} sequences x 32" in done.stdout
        return out / kind

    return folder


# FSDP2 with whole checkpoints computes the same, and is in the slow tests below.
@pytest.mark.parametrize("other", ["ddp", "sharded"])
def test_losses_do_not_depend_on_the_number_of_processes(run_of: Run, other: str):
    one, several = run_of("one"), run_of(other)
    assert_same_curve(one, several)
    lengths = [json.loads((run / "lengths.json").read_text())["by_context"] for run in (one, several)]
    assert [row["loss"] for row in lengths[0]] == pytest.approx([row["loss"] for row in lengths[1]], abs=1e-5)
    facts = json.loads((several / "run.json").read_text())
    assert facts["status"] == "finished" and facts["processes"] == 2
    assert (several / "samples.txt").read_text() == (one / "samples.txt").read_text()
    assert (several / "checkpoints/step-0000020/shards/.metadata").exists() == (other == "sharded")


# The other pairs are slow tests. One with one is in test_train.py, bit for bit.
QUICK = {("one", "fsdp"), ("sharded", "one")}
PAIRS = [
    pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow)
    for pair in itertools.product(KINDS, KINDS)
    if pair != ("one", "one")
]


@pytest.mark.parametrize(("saved_by", "resumed_by"), PAIRS)
def test_each_saves_and_each_other_resumes(
    run_of: Run, arguments: list[str], tmp_path: Path, saved_by: str, resumed_by: str
):
    folder, one = tmp_path / saved_by, run_of("one")
    subprocess.run(["cp", "-r", run_of(saved_by), folder], check=True)
    last = sorted((folder / "checkpoints").iterdir())[-1]
    subprocess.run(["rm", "-r", last], check=True)
    done = go(
        1 if resumed_by == "one" else 2,
        [*arguments[:-1], f"--out_dir={tmp_path}", f"--name={saved_by}", "--resume"],
        *KINDS[resumed_by],
        f"--train.sharded_checkpoints={str(resumed_by == 'sharded').lower()}",
        "--eval.length_targets=64",
    )
    assert done.stdout.count(f"resuming {folder} from step 10") == 1
    assert_same_curve(one, folder)
    ends = [checkpoint.load_model(run / "checkpoints/step-0000020").state_dict() for run in (one, folder)]
    assert ends[0].keys() == ends[1].keys()
    # AdamW's first steps are all of one size, whatever the gradient: its last bits can turn a weight around.
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-4) for name in ends[0])
    if resumed_by == "sharded":
        return
    states = [
        checkpoint.load_optimizer(run / "checkpoints/step-0000020")["optimizers"][0]["state"] for run in (one, folder)
    ]
    assert states[0].keys() == states[1].keys()
    for number, values in states[0].items():
        for name, tensor in values.items():
            assert torch.allclose(tensor, states[1][number][name], atol=1e-5), (number, name)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_processes_share_one_batch(size: int):
    chosen, parts = TrainingOrder(100, 8, seed=3).at(5), []
    for rank in range(size):
        member = Team(torch.device("cpu"))
        member.rank, member.size = rank, size
        parts.append(member.share(chosen))
    assert np.array_equal(np.concatenate(parts), chosen)


@pytest.mark.parametrize(("windows", "size"), [(8, 1), (8, 2), (7, 3), (1, 4)])
def test_the_processes_share_what_is_scored_and_count_it_once(windows: int, size: int):
    starts, counted, lengths = np.arange(windows) * 10, [], set()
    for rank in range(size):
        member = Team(torch.device("cpu"))
        member.rank, member.size = rank, size
        own, count = member.portion(starts)
        counted.extend(own[:count])
        lengths.add(len(own))
    assert counted == starts.tolist() and len(lengths) == 1


def test_a_batch_that_cannot_be_shared_is_refused(arguments: list[str]):
    done = go(2, arguments, "--name=odd", "--train.batch_size=3", expect=1)
    assert "train.py: error: train.batch_size 3 cannot be shared by 2 processes" in done.stderr
    assert str(ROOT / "train.py") not in done.stderr, "a traceback of ours"
    assert not (Path(arguments[-1].partition("=")[2]) / "odd").exists()


def start(arguments: list[str], *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *torchrun(2, *options), *arguments],
        cwd=ROOT,
        env=os.environ | RESTARTABLE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_lines(run: Path, lines: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < lines:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def workers(parent: int) -> list[int]:
    """Processes that torchrun has started, by their order."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]


# Long enough to be killed in, and gentle enough that 60 steps do not blow up the last bits of a sum.
LONG = ["--train.steps=60", "--train.learning_rate=1e-3", "--eval.every=1"]


@pytest.mark.slow  # test_hosts.py has one in every run
def test_a_killed_worker_is_started_again_and_the_run_ends_the_same(arguments: list[str], tmp_path: Path):
    arguments = [*arguments[:-1], *LONG, f"--out_dir={tmp_path}"]
    go(1, arguments, "--name=alone")
    run = tmp_path / "killed"
    process = start([*arguments, "--name=killed"], "--max_restarts=2")
    for victim in (0, 1):
        wait_for_lines(run, 2 * (12 + 20 * victim), process)
        os.kill(workers(process.pid)[victim], signal.SIGKILL)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said[-4000:]
    assert said.count(f"resuming {run} from step") == 2, said[-4000:]
    assert_same_points(tmp_path / "alone", run, "train/loss", "val/loss")


def test_an_interrupt_stops_all_after_one_step(run_of: Run, arguments: list[str]):
    run = run_of("one").parent / "interrupted"
    process = start([*arguments, f"--name={run.name}", "--train.steps=100000", "--train.save_every=100000"])
    wait_for_lines(run, 5, process)
    # One process alone hears it, and all stop at the same step.
    os.kill(workers(process.pid)[1], signal.SIGTERM)
    said = process.communicate(timeout=120)[0]
    assert "saved; go on with --resume" in said
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert len(list((run / "checkpoints").iterdir())) == 1


def test_wandb_has_one_run(run_of: Run):
    assert len(list((run_of("ddp") / "wandb").glob("offline-run-*"))) == 1
