"""Every command of the README is run as written, with the long runs cut to a few steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# What keeps a run short; everything else of the command stays as the README has it.
SHORT_RUN = (
    "--train.steps=4 --train.warmup_steps=1 --train.save_every=2 --train.batch_size=2 --eval.every=4 --eval.windows=4 "
    "--eval.length_targets=32 --eval.length_ratios=[0.25,1,2] --eval.sample_tokens=2"
)
SHORT = {
    "train.py": SHORT_RUN,
    "scripts/generate.py": "--max_new_tokens=5",
    "scripts/benchmark.py train": "--rounds=1 --steps=1",
    "scripts/evaluate.py": "--targets=64 --copies=2 --variants=false",
    "scripts/study.py": f"{SHORT_RUN} --targets=64",
}
# Set-up of a virtual environment and the tests themselves: .ci/run does these.
NOT_HERE = ("python3 -m venv", "source ", "pip install", "make ", "git clone", "cd ")


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *NOT_HERE))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A copy of what git tracks, so that runs and caches of the commands fall where they do for a newcomer."""
    copy = tmp_path_factory.mktemp("newcomer")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "my_texts").mkdir()
    (copy / "my_texts" / "book.txt").write_text("\n\n".join(texts * 4), encoding="utf-8")
    return copy


def test_the_readme_has_the_commands_people_are_told_to_type():
    assert {
        "python train.py --config small.yaml",
        "python train.py --config small.yaml --model.position sinusoidal",
    } <= set(commands())


# What other tests run as well, to the same end: slow tests here.
ELSEWHERE = ("scripts/study.py", "scripts/benchmark.py train", "--seed 1", "--model.position alibi", "torchrun")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(line, marks=pytest.mark.slow if any(part in line for part in ELSEWHERE) else [])
        for line in commands()
    ],
)
def test_command(command: str, folder: Path):
    """In the README's order: later commands use the runs of earlier ones."""
    bin_dir = Path(sys.executable).parent
    for script, flags in SHORT.items():
        if (
            re.search(rf"(python|torchrun .*) {re.escape(script)}", command)
            and "--help" not in command
            and "--print_config" not in command
        ):
            command = f"{command} {flags}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-500:]}\n{done.stderr}"
