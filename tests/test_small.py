"""What the README promises of `small.yaml`, measured: minutes, so run with `make slow`, on a machine that does nothing else."""

import json
import resource
import time
from pathlib import Path

import pytest
from conftest import ROOT, run_program

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("position", ["rope", "sinusoidal"])
def test_small_in_eight_minutes_and_two_gigabytes(position: str, tmp_path: Path):
    start = time.monotonic()
    done = run_program(
        ROOT / "train.py", "--config", "small.yaml", f"--model.position={position}", cwd=tmp_path, timeout=900
    )
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / f"small-{position}"
    points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bits = [point["val/bits_per_byte"] for point in points if "val/bits_per_byte" in point][-1]
    gigabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{position}: {seconds:.0f} s, {bits:.4f} bits/byte, {gigabytes:.2f} GiB")
    assert seconds <= 480 and gigabytes <= 2
    assert position != "rope" or bits <= 1.38
    contexts = [row["context"] for row in json.loads((run / "lengths.json").read_text())["by_context"]]
    assert contexts[0] == 32 and contexts[-1] == 2048


def test_tiny_in_thirty_seconds_and_data_is_reused(tmp_path: Path):
    start = time.monotonic()
    done = run_program(ROOT / "train.py", "--config", "tiny.yaml", cwd=tmp_path)
    assert done.returncode == 0 and time.monotonic() - start < 30
    assert "preparing" in done.stdout
    again = run_program(ROOT / "train.py", "--config", "tiny.yaml", "--seed=1", cwd=tmp_path)
    assert again.returncode == 0 and "preparing" not in again.stdout
