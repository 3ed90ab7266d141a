"""Shared pieces: a small real text, the settings of a run of seconds, and the programs as a user starts them."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# The same cases on every machine, and no limit on time: the machine may be busy.
settings.register_profile("ropewalk", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("ropewalk")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Two test processes share two cores, and these models are too small to share among threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may reach a network, and none may find the developer's account.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
os.environ.pop("WANDB_API_KEY", None)


# The longest files go first, so that neither of two test processes is left alone with one at the end.
LONGEST = ("test_study", "test_faults", "test_generation", "test_readme", "test_parallel", "test_torture")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def refused(main: Callable[[list[str]], None], arguments: list, capsys: pytest.CaptureFixture) -> str:
    """The one line with which a program refuses, run in this process: as the program would, and seconds faster."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err


def run_program(
    *arguments: object, cwd: Path = ROOT, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess:
    """Run a Python program of the repository without a terminal, as `python <arguments>` from `cwd`."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Twelve documents of made-up sentences, some with letters of two, three and four bytes."""
    rng = random.Random(0)
    words = [
        "the",
        "rope",
        "walks",
        "along",
        "a",
        "long",
        "straight",
        "house",
        "where",
        "they",
        "twist",
        "hemp",
        "into",
        "cable",
        "ünder",
        "東京",
        "🙂",
        "and",
    ]
    return [" ".join(rng.choice(words) for _ in range(600)) + f"\nDocument {number} ends.\n" for number in range(12)]


@pytest.fixture(scope="session")
def text_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def small_run(small_settings: list[str], tmp_path: Path) -> list[str]:
    """Command line of a run of about a second: 2 layers, dim 32, context 32, in a folder of its own."""
    return [*small_settings, f"--out_dir={tmp_path / 'runs'}", "--name=run"]


@pytest.fixture(scope="session")
def small_settings(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """small_run without its place and name."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    return [
        "--config=tiny.yaml",
        "--data.source=files",
        f"--data.path={text_folder}",
        "--data.limit=null",
        "--data.vocab_size=300",
        f"--data.cache_dir={cache}",
        "--data.val_fraction=0.25",
        "--train.steps=20",
        "--train.batch_size=4",
        "--train.warmup_steps=2",
        "--train.log_every=1",
        "--train.save_every=1000",
        "--eval.every=1000",
        "--eval.windows=16",
        "--eval.length_targets=64",
        "--eval.sample_tokens=4",
        "--tracking.mode=disabled",
    ]
