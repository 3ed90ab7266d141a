"""Two hosts train one model: network namespaces with a cable between them, real torchrun rendezvous, real SIGKILL."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, run_program
from test_parallel import LONG, RESTARTABLE, assert_same_points, wait_for_lines

ADDRESSES = {"ropewalk-a": "10.77.0.1", "ropewalk-b": "10.77.0.2"}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Names and addresses of two hosts that see each other and nothing else."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs iproute2 and the right to make network namespaces")
    made = []
    try:
        try:
            for name in ADDRESSES:
                ip("netns", "add", name)
                made.append(name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
        a, b = ADDRESSES
        ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for name, address in ADDRESSES.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("cable", "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield ADDRESSES
    finally:
        for name in made:
            ip("netns", "del", name)


def start(host: str, arguments: list[str]) -> subprocess.Popen:
    first, address = next(iter(ADDRESSES.values())), ADDRESSES[host]
    options = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint={first}:29511"]
    # Both namespaces have this machine's name, so neither could tell that the first address is its own.
    options += [f"--rdzv_conf=is_host={int(address == first)}", f"--local_addr={address}"]
    options += ["--rdzv_id=ropewalk", "--max_restarts=2"]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", *options, "train.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **RESTARTABLE, "GLOO_SOCKET_IFNAME": "cable"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def worker(agent: subprocess.Popen) -> int:
    """`ip netns exec` becomes torchrun, whose only child of this name is the worker."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    (pid,) = (int(pid) for pid in children if "train.py" in Path(f"/proc/{pid}/cmdline").read_text())
    return pid


def test_two_hosts_train_one_model_and_outlive_a_killed_worker(
    hosts: dict[str, str], small_settings: list[str], tmp_path: Path
):
    arguments = [*small_settings, "--train.save_every=10", *LONG, f"--out_dir={tmp_path}"]
    alone = run_program("train.py", *arguments, "--name=alone")
    assert alone.returncode == 0, alone.stderr

    agents = [start(host, [*arguments, "--name=together"]) for host in hosts]
    try:
        wait_for_lines(tmp_path / "together", 2 * 12, agents[0])
        os.kill(worker(agents[1]), signal.SIGKILL)
        said = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert any(f"resuming {tmp_path / 'together'} from step" in text for text in said), said
    assert_same_points(tmp_path / "alone", tmp_path / "together", "train/loss", "val/loss")
