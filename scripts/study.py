"""Train every encoding from every seed, measure each run, and set them side by side:
`python scripts/study.py --config small.yaml --positions rope sinusoidal alibi nope --seeds 0 1 2`.

What is finished is skipped and what was interrupted goes on from its last checkpoint, so the same command can be
given again after any accident. A run that an earlier, killed study left training is not touched: its folder is held.
Every other flag is passed on to train.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.run_folder import read_run_json
from configs.schema import Experiment, gather_lists, parse, parse_experiment, run_guarded
from model import checkpoint
from model.config import SCALING_KINDS

ROOT = Path(__file__).resolve().parent.parent
T, R = TypeVar("T"), TypeVar("R")


@dataclass(frozen=True)
class StudyConfig:
    """Which runs make up the study; flags of train.py may be added."""

    config: str = "small.yaml"
    """Settings of all runs."""
    positions: tuple[str, ...] = ("rope", "sinusoidal", "alibi", "nope")
    """Position encodings; the others are subtracted from the first."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of each encoding."""
    out: str | None = None
    """Folder of the report; null is runs/<group>-study."""
    fine_tune_steps: int = 0
    """Go on with each RoPE run for so many steps at a longer context, once for each way of stretching it; 0 does not."""
    fine_tune_ratio: int = 4
    """The longer context, as a multiple of the trained length."""
    fine_tune_kinds: tuple[str, ...] = tuple(SCALING_KINDS)
    """Ways of stretching RoPE to fine-tune with; none is plain RoPE."""
    targets: int = 8192
    """Targets of each run's loss by context."""
    wandb: bool = False
    """Log the comparison to wandb."""
    jobs: int = 1
    """Runs trained and measured at the same time, each with its share of the cores: small models gain by it."""

    def __post_init__(self) -> None:
        if not self.positions or not self.seeds:
            raise ValueError("positions and seeds must name at least one each")
        if self.jobs < 1:
            raise ValueError(f"jobs is {self.jobs}: give 1 or more")
        if self.fine_tune_steps < 0 or self.fine_tune_ratio < 2:
            raise ValueError("fine_tune_steps must be 0 or more and fine_tune_ratio 2 or more")


def call(program: str, *arguments: str, jobs: int = 1, label: str = "") -> None:
    """Run a program of this repository; a failure, whose line it has printed, ends the study with its exit code.

    One of several at a time gets its share of the cores, no progress bar, and its label before every line.
    """
    command, environment = [sys.executable, str(ROOT / program), *arguments], dict(os.environ)
    if jobs > 1:
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        environment |= {"OMP_NUM_THREADS": threads, "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE if jobs > 1 else None, text=True) as process:
        for line in process.stdout or ():
            print(f"{label}: {line}", end="", flush=True)
    if process.returncode:
        sys.exit(process.returncode)


def at_once(jobs: int, work: Callable[[T], R], cells: Iterable[T]) -> list[R]:
    """Results of `work` on all cells, `jobs` of them at a time, in order; after a failure no other is begun."""
    with ThreadPoolExecutor(jobs) as pool:
        begun = [pool.submit(work, cell) for cell in cells]
        try:
            return [cell.result() for cell in begun]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def status(run: Path) -> str:
    """What run.json says of a run; "missing" if there is none."""
    return read_run_json(run).get("status", "missing")


def make_run(config: StudyConfig, arguments: list[str], variants: bool = True) -> Experiment:
    """Train a run, or what is left of it, and measure it; both only where it has not been done."""
    experiment = parse_experiment(arguments)
    run = experiment.run_dir
    before = status(run)
    if before == "finished":
        print(f"study: {run} is finished")
    else:
        print(f"study: {run} is {before}", flush=True)
        resume = f"--resume={'false' if before == 'missing' else 'true'}"
        call("train.py", *arguments, resume, jobs=config.jobs, label=run.name)
    lengths = json.loads((run / "lengths.json").read_text())
    if lengths.get("checkpoint") != checkpoint.latest(run).name:
        flags = (f"--targets={config.targets}", f"--variants={json.dumps(variants)}")
        call("scripts/evaluate.py", str(run), *flags, jobs=config.jobs, label=run.name)
    return experiment


def fine_tuning(config: StudyConfig, base: Experiment, shared: list[str]) -> list[list[str]]:
    """Command lines that go on with a RoPE run at a longer context, one for each way of stretching it."""
    trained = base.data.context
    longer = config.fine_tune_ratio * trained
    flags = [
        *shared,
        f"--seed={base.seed}",
        f"--init_from={base.run_dir}",
        f"--data.context={longer}",
        # As many tokens a step as before, and the same contexts and targets in the length curve.
        f"--train.batch_size={max(1, base.train.batch_size * trained // longer)}",
        f"--train.steps={config.fine_tune_steps}",
        f"--train.warmup_steps={config.fine_tune_steps // 10}",
        f"--train.learning_rate={base.train.learning_rate / 10}",
        f"--eval.length_ratios={json.dumps([context / longer for context in base.contexts])}",
    ]
    return [
        [
            *flags,
            f"--name={base.run_name}-fine-tuned-{kind}",
            f"--model.rope.scaling.kind={kind}",
            f"--model.rope.scaling.factor={1 if kind == 'none' else config.fine_tune_ratio}",
            f"--model.rope.scaling.trained_length={trained}",
        ]
        for kind in config.fine_tune_kinds
    ]


def study(config: StudyConfig, passed_on: list[str]) -> None:
    """Everything there is to do, in order; done parts are skipped."""
    shared = [f"--config={config.config}", *passed_on]
    cells = [
        [*shared, f"--model.position={position}", f"--seed={seed}"]
        for seed in config.seeds
        for position in config.positions
    ]
    runs = at_once(config.jobs, lambda cell: make_run(config, cell), cells)
    bases = [run for run in runs if config.fine_tune_steps and run.model.position == "rope"]
    cells = [cell for base in bases for cell in fine_tuning(config, base, shared)]
    fine_tuned = at_once(config.jobs, lambda cell: make_run(config, cell, variants=False), cells)
    out = config.out or str(Path(runs[0].out_dir) / f"{runs[0].tracking.group}-study")
    lists = {"runs": runs, "fine_tuned": fine_tuned}
    call(
        "scripts/compare.py",
        *(f"--{name}={json.dumps([str(run.run_dir) for run in made])}" for name, made in lists.items()),
        f"--out={out}",
        f"--reference={config.positions[0]}",
        f"--wandb={json.dumps(config.wandb)}",
    )


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings, else that of the part that failed."""
    arguments = gather_lists(
        sys.argv[1:] if arguments is None else arguments, {"positions", "seeds", "fine_tune_kinds"}
    )
    own = {f"--{name}" for name in StudyConfig.__dataclass_fields__} | {"--help", "--debug"}
    mine, passed_on = [], []
    taken = mine
    for argument in arguments:
        if argument.startswith("--"):
            taken = mine if argument.partition("=")[0] in own else passed_on
        taken.append(argument)
    config = parse(
        StudyConfig, mine, prog="study.py", description="Train, measure and compare; other flags go to train.py."
    )
    run_guarded("study.py", lambda: study(config, passed_on), "--debug" in arguments)


if __name__ == "__main__":
    main()
