"""Train every encoding from every seed, measure each run, and set them side by side:
`python scripts/study.py --config small.yaml --positions rope sinusoidal alibi nope --seeds 0 1 2`.

What is finished is skipped and what was interrupted goes on from its last checkpoint, so the same command can be
given again after any accident. Every other flag is passed on to train.py.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.schema import Experiment, gather_lists, parse, parse_experiment, run_guarded
from model import checkpoint
from model.config import SCALING_KINDS

ROOT = Path(__file__).resolve().parent.parent


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

    def __post_init__(self) -> None:
        if not self.positions or not self.seeds:
            raise ValueError("positions and seeds must name at least one each")
        if self.fine_tune_steps < 0 or self.fine_tune_ratio < 2:
            raise ValueError("fine_tune_steps must be 0 or more and fine_tune_ratio 2 or more")


def call(program: str, *arguments: str) -> None:
    """Run a program of this repository; a failure, whose line it has printed, ends the study with its exit code."""
    done = subprocess.run([sys.executable, str(ROOT / program), *arguments])
    if done.returncode:
        sys.exit(done.returncode)


def status(run: Path) -> str:
    """What run.json says of a run; "missing" if there is none."""
    path = run / "run.json"
    return json.loads(path.read_text())["status"] if path.is_file() else "missing"


def make_run(arguments: list[str], targets: int, variants: bool = True) -> Experiment:
    """Train a run, or what is left of it, and measure it; both only where it has not been done."""
    experiment = parse_experiment(arguments)
    run = experiment.run_dir
    before = status(run)
    if before == "finished":
        print(f"study: {run} is finished")
    else:
        print(f"study: {run} is {before}", flush=True)
        call("train.py", *arguments, f"--resume={'false' if before == 'missing' else 'true'}")
    lengths = json.loads((run / "lengths.json").read_text())
    if lengths.get("checkpoint") != checkpoint.latest(run).name:
        call("scripts/evaluate.py", str(run), f"--targets={targets}", f"--variants={json.dumps(variants)}")
    return experiment


def fine_tune(config: StudyConfig, base: Experiment, shared: list[str]) -> list[str]:
    """Go on with a RoPE run at a longer context, once for each way of stretching it; returns the run folders."""
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
    runs = []
    for kind in config.fine_tune_kinds:
        stretch = [
            f"kind={kind}",
            f"factor={1 if kind == 'none' else config.fine_tune_ratio}",
            f"trained_length={trained}",
        ]
        name = f"--name={base.run_name}-fine-tuned-{kind}"
        made = make_run(
            [*flags, name, *(f"--model.rope.scaling.{setting}" for setting in stretch)], config.targets, False
        )
        runs.append(str(made.run_dir))
    return runs


def study(config: StudyConfig, passed_on: list[str]) -> None:
    """Everything there is to do, in order; done parts are skipped."""
    shared = [f"--config={config.config}", *passed_on]
    runs = [
        make_run([*shared, f"--model.position={position}", f"--seed={seed}"], config.targets)
        for seed in config.seeds
        for position in config.positions
    ]
    fine_tuned = [
        name
        for run in runs
        if config.fine_tune_steps and run.model.position == "rope"
        for name in fine_tune(config, run, shared)
    ]
    out = config.out or str(Path(runs[0].out_dir) / f"{runs[0].tracking.group}-study")
    lists = {"runs": [str(run.run_dir) for run in runs], "fine_tuned": fine_tuned}
    call(
        "scripts/compare.py",
        *(f"--{name}={json.dumps(paths)}" for name, paths in lists.items()),
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
