"""Set runs side by side: `python scripts/compare.py runs/small-*`.

Runs may differ in position encoding and seed, and in nothing else that matters. Runs of one seed start from the
same weights and see the same batches, so differences are taken seed by seed and averaged over seeds, with a 95%
interval from Student's t. Writes report.md, lengths.csv, report.html and the plots into one folder.
"""

import base64
import csv
import html
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.run_folder import flatten
from configs.schema import Experiment, gather_lists, parse, parse_experiment, run_guarded
from configs.tracking import Wandb, mark_trained_length, new_figure, save_figure
from model import checkpoint

# Settings in which runs of one comparison may differ: they are the question, or change no number.
MAY_DIFFER = (
    "model.position",
    "seed",
    "name",
    "out_dir",
    "resume",
    "device",
    "tracking.",
    "eval.sample",
    "data.cache_dir",
    "train.save_every",
    "train.keep",
)


@dataclass(frozen=True)
class CompareConfig:
    """What to compare."""

    runs: tuple[str, ...] = ()
    """Run folders that evaluate.py has measured."""
    fine_tuned: tuple[str, ...] = ()
    """Run folders that went on from RoPE runs at a longer context; they get a table of their own."""
    out: str = "runs/comparison"
    """Folder of the report."""
    reference: str = "rope"
    """Position encoding that the others are subtracted from."""
    wandb: bool = False
    """Log the comparison as a run of the group."""


@dataclass
class Run:
    """One finished run."""

    path: Path
    config: Experiment
    settings: dict[str, Any]
    lengths: dict[str, Any]
    train: list[tuple[int, float]] = field(default_factory=list)
    val: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def position(self) -> str:
        return self.config.model.position

    def at(self, context: int) -> float:
        """Loss at a context, on the shared targets."""
        return next(row["loss"] for row in self.lengths["by_context"] if row["context"] == context)


@dataclass(frozen=True)
class Table:
    """A table for the report, in every format alike."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return (
            f"### {self.title}\n\n{self.note}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
        )

    def html(self) -> str:
        def row(cells: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self.rows)
        return (
            f"<h2>{html.escape(self.title)}</h2><p>{html.escape(self.note)}</p>"
            f'<div class="wide"><table><thead>{row(self.columns, "th")}</thead><tbody>{body}</tbody></table></div>'
        )


def load_run(name: str) -> Run:
    """Read a run folder; FileNotFoundError or ValueError if it is no measured run."""
    path = Path(name)
    for needed, remedy in (
        ("config.yaml", "give a run folder"),
        ("metrics.jsonl", "train it first"),
        ("lengths.json", f"run python scripts/evaluate.py {path}"),
    ):
        if not (path / needed).is_file():
            raise FileNotFoundError(f"{path} has no {needed}: {remedy}")
    checkpoint.latest(path)
    lengths = json.loads((path / "lengths.json").read_text())
    if "copy_gain" not in lengths:
        raise ValueError(
            f"{path / 'lengths.json'} has only the curve of training: run python scripts/evaluate.py {path}"
        )
    config = parse_experiment(["--config", str(path / "config.yaml")])
    run = Run(path, config, flatten(yaml.safe_load((path / "config.yaml").read_text())), lengths)
    for line in (path / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        if "train/loss" in point:
            run.train.append((point["tokens"], point["train/loss"]))
        if "val/loss" in point:
            run.val.append((point["tokens"], point["val/loss"], point["val/bits_per_byte"]))
    return run


def refuse_unlike(runs: list[Run]) -> None:
    """ValueError that lists what the runs differ in besides position and seed."""
    states = [checkpoint.read_state(checkpoint.latest(run.path)) for run in runs]
    first = runs[0]
    differences = []
    for run, state in zip(runs, states, strict=True):
        here = {k: v for k, v in run.settings.items() if not k.startswith(MAY_DIFFER)}
        there = {k: v for k, v in first.settings.items() if not k.startswith(MAY_DIFFER)}
        for name in ("tokenizer_sha256", "vocab_size", "data_fingerprint", "step"):
            here[name], there[name] = state[name], states[0][name]
        for name in ("targets", "block", "bytes"):
            here[f"lengths.{name}"], there[f"lengths.{name}"] = run.lengths[name], first.lengths[name]
        differences += [
            f"{key} is {there.get(key)!r} in {first.path} and {here.get(key)!r} in {run.path}"
            for key in sorted(here.keys() | there.keys())
            if here.get(key) != there.get(key)
        ]
    if differences:
        raise ValueError(f"no fair comparison: {'; '.join(differences)}")
    seen: dict[tuple[str, int], Path] = {}
    for run in runs:
        key = (run.position, run.config.seed)
        if key in seen:
            raise ValueError(f"{seen[key]} and {run.path} are both {key[0]} of seed {key[1]}: give one of them")
        seen[key] = run.path


def interval(values: list[float]) -> float:
    """Half of the 95% interval of the mean, from Student's t; nan for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def spread(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


class Comparison:
    """Runs grouped by position encoding, and the tables and plots made of them."""

    def __init__(self, runs: list[Run], reference: str, fine_tuned: Sequence[Run] = ()) -> None:
        refuse_unlike(runs)
        self.runs, self.fine_tuned = runs, fine_tuned
        self.groups = {p: [r for r in runs if r.position == p] for p in dict.fromkeys(r.position for r in runs)}
        self.reference = reference if reference in self.groups else runs[0].position
        self.trained = runs[0].config.data.context
        self.contexts = [row["context"] for row in runs[0].lengths["by_context"]]

    def differences(self, position: str, context: int | None) -> list[float]:
        """Loss of `position` minus that of the reference, seed by seed; at a context, or of validation."""
        loss = lambda run: run.val[-1][1] if context is None else run.at(context)  # noqa: E731
        base = {run.config.seed: loss(run) for run in self.groups[self.reference]}
        return [loss(run) - base[run.config.seed] for run in self.groups[position] if run.config.seed in base]

    def paired(self, position: str, context: int | None) -> str:
        values = self.differences(position, context)
        if not values:
            return "no seed in common"
        return f"{mean(values):+.3f}" + (f" ± {interval(values):.3f}" if len(values) > 1 else "")

    def tables(self) -> list[Table]:
        lengths, first = self.runs[0].lengths, self.runs[0]
        others = [p for p in self.groups if p != self.reference]
        seeds = ", ".join(f"{p}: {len(g)} seeds" for p, g in self.groups.items())
        made = [
            Table(
                "At the trained length",
                f"Held-out windows of {self.trained} tokens, after {first.val[-1][0]:,} tokens of training. Mean ± standard deviation "
                f"over seeds ({seeds}); differences are paired by seed, mean ± 95% interval.",
                ["encoding", "nats/token", "bits/byte", f"minus {self.reference}, nats/token"],
                [
                    [
                        p,
                        spread([r.val[-1][1] for r in g]),
                        spread([r.val[-1][2] for r in g]),
                        self.paired(p, None) if p in others else "",
                    ]
                    for p, g in self.groups.items()
                ],
            ),
            Table(
                "Loss by context",
                f"nats/token on the same {lengths['targets']:,} targets ({lengths['bytes']:,} bytes of {lengths['documents']} held-out documents) at every "
                f"context, in blocks of {lengths['block']}. The row of {self.trained} is what cropping to the trained length gives; a longer "
                "context helps only where it is below that row.",
                ["context", *self.groups, *(f"{p} minus {self.reference}" for p in others)],
                [
                    [
                        f"{c} (trained length)" if c == self.trained else str(c),
                        *(spread([r.at(c) for r in g]) for g in self.groups.values()),
                        *(self.paired(p, c) for p in others),
                    ]
                    for c in self.contexts
                ],
            ),
        ]
        for position, group in self.groups.items():
            if all("variants" in run.lengths for run in group):
                made.append(self.variant_table(position, group))
        if self.fine_tuned:
            made.append(self.fine_tuned_table())
        made.append(self.copy_table())
        return made

    def copy_table(self) -> Table:
        copies = self.runs[0].lengths["copy_gain"]
        kinds = {"in place": "gain_in_place", "first minus second": "gain"}
        found = lambda run, i, key: run.lengths["copy_gain"]["rows"][i][key]  # noqa: E731
        return Table(
            "Copy gain",
            f"How many nats/token a passage of {copies['passage']} tokens costs less because it stood earlier, by the distance in "
            f"tokens ({copies['passages']} passages). In place: against the same tokens at the same place after another passage. "
            "First minus second: against the passage's first time, which mixes in what the far position does.",
            ["gap", *(f"{p}, {kind}" for p in self.groups for kind in kinds)],
            [
                [
                    str(row["gap"]),
                    *(spread([found(r, i, k) for r in g]) for g in self.groups.values() for k in kinds.values()),
                ]
                for i, row in enumerate(copies["rows"])
            ],
        )

    def variant_table(self, position: str, group: list[Run]) -> Table:
        names = list(group[0].lengths["variants"])
        past = [c for c in self.contexts if c > self.trained]
        crop = spread([run.at(self.trained) for run in group])
        return Table(
            f"{position}: reading further without training (zero-shot)",
            f"nats/token on the same targets; cropping gives {crop}. window: attention limited to the last {self.trained} tokens."
            + (" The others stretch RoPE by context / trained length." if len(names) > 1 else ""),
            ["context", "plain", *names],
            [
                [
                    str(c),
                    spread([run.at(c) for run in group]),
                    *(spread([run.lengths["variants"][name][i]["loss"] for run in group]) for name in names),
                ]
                for i, c in enumerate(past)
            ],
        )

    def fine_tuned_table(self) -> Table:
        kinds: dict[str, list[Run]] = {}
        for run in self.fine_tuned:
            kinds.setdefault(run.config.model.rope.scaling.kind, []).append(run)
            if [row["context"] for row in run.lengths["by_context"]] != self.contexts or run.lengths[
                "bytes"
            ] != self.runs[0].lengths["bytes"]:
                raise ValueError(f"{run.path} was measured on other contexts or targets than {self.runs[0].path}")
        first = self.fine_tuned[0].config
        return Table(
            f"RoPE fine-tuned for {first.train.steps} steps at a context of {first.data.context}",
            "nats/token on the same targets, by the way RoPE was stretched. These models were trained at the longer context: not to be "
            "set beside zero-shot numbers.",
            ["context", *kinds],
            [[str(c), *(spread([run.at(c) for run in group]) for group in kinds.values())] for c in self.contexts],
        )

    def draw(
        self,
        x_label: str,
        title: str,
        places: list[float],
        values: Callable[[Run], list[float]],
        ticks: list[int],
        y_label: str = "loss (nats per token)",
    ) -> tuple[Any, Any, Callable[[str], dict[str, str]]]:
        """A figure over tokens with a line for each encoding: the mean over seeds, in a band that is their range."""
        figure, axes, style = new_figure(x_label, y_label, f"{title}; mean and range over seeds")
        for name, group in self.groups.items():
            at_place = list(zip(*map(values, group), strict=True))
            axes.plot(places, [mean(found) for found in at_place], label=name, **style(name))
            low, high = ([pick(found) for found in at_place] for pick in (min, max))
            axes.fill_between(places, low, high, color=style(name)["color"], alpha=0.2, lw=0)
        mark_trained_length(axes, self.trained, ticks)
        return figure, axes, style

    def plots(self, folder: Path) -> dict[str, Path]:
        """Write every plot as PNG and SVG; returns titles and PNG files."""
        made = {
            "Training and validation loss": folder / "loss.png",
            "Loss by context": folder / "loss-by-context.png",
            "Loss by position": folder / "loss-by-position.png",
            "Copy gain": folder / "copy-gain.png",
        }
        train, context, position, copy = made.values()
        first = self.runs[0].lengths

        figure, axes, style = new_figure(
            "tokens of training", "loss (nats per token)", "Training (thin, smoothed) and validation loss (marks)"
        )
        for name, group in self.groups.items():
            for run in group:
                every = max(1, len(run.train) // 60)
                chunks = [run.train[i : i + every] for i in range(0, len(run.train), every)]
                smooth = [(chunk[-1][0], mean(loss for _, loss in chunk)) for chunk in chunks]
                axes.plot(*zip(*smooth, strict=True), lw=0.7, alpha=0.7, color=style(name)["color"])
                tokens, losses, _ = zip(*run.val, strict=True)
                axes.plot(tokens, losses, lw=1.2, label=name if run is group[0] else None, **style(name))
        axes.set_ylim(top=mean(run.val[0][1] for run in self.runs) + 1.5)
        save_figure(figure, axes, train)

        figure, axes, style = self.draw(
            "context (tokens)",
            "Loss by context on the same targets",
            self.contexts,
            lambda run: [run.at(c) for c in self.contexts],
            self.contexts,
        )
        for name, group in self.groups.items():
            axes.axhline(mean(r.at(self.trained) for r in group), color=style(name)["color"], linestyle="--", lw=0.8)
        axes.plot([], [], color="0.35", linestyle="--", lw=0.8, label="just crop")
        save_figure(figure, axes, context)

        figure, axes, _ = self.draw(
            "position in the window (tokens)",
            "Loss by position in long windows",
            [(bucket["from"] + bucket["to"]) / 2 for bucket in first["by_position"]["buckets"]],
            lambda run: [bucket["loss"] for bucket in run.lengths["by_position"]["buckets"]],
            [c for c in self.contexts if c in (self.trained, *self.contexts[::2])],
        )
        save_figure(figure, axes, position)

        gaps = [row["gap"] for row in first["copy_gain"]["rows"]]
        figure, axes, _ = self.draw(
            "gap between a passage and its copy (tokens)",
            "How much an earlier copy helps, in place",
            gaps,
            lambda run: [row["gain_in_place"] for row in run.lengths["copy_gain"]["rows"]],
            gaps,
            "gain (nats per token)",
        )
        axes.axhline(0, color="0.35", lw=0.8)
        save_figure(figure, axes, copy)
        return made

    def write(self, folder: Path) -> tuple[list[Table], dict[str, Path]]:
        """Write the whole report into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        tables, plots = self.tables(), self.plots(folder)
        title = f"{self.runs[0].config.tracking.group}: {', '.join(self.groups)}"
        names = ", ".join(str(run.path) for run in self.runs)
        markdown = [f"# {title}\n", f"Runs: {names}.\n", *(table.markdown() for table in tables)]
        markdown += [f"### {name}\n\n![{name}]({path.name})\n" for name, path in plots.items()]
        (folder / "report.md").write_text("\n".join(markdown), encoding="utf-8")
        figures = "".join(
            f"<h2>{name}</h2><img alt='{name}' src='data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}'>"
            for name, path in plots.items()
        )
        page = PAGE.format(
            title=html.escape(title), runs=html.escape(names), tables="".join(t.html() for t in tables), figures=figures
        )
        (folder / "report.html").write_text(page, encoding="utf-8")
        with (folder / "lengths.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["run", "position", "seed", "variant", "context", "nats_per_token", "bits_per_byte"])
            for run in self.runs:
                for variant, rows in {"plain": run.lengths["by_context"], **run.lengths.get("variants", {})}.items():
                    for row in rows:
                        writer.writerow(
                            [
                                run.path,
                                run.position,
                                run.config.seed,
                                variant,
                                row["context"],
                                row["loss"],
                                row["bits_per_byte"],
                            ]
                        )
        return tables, plots

    def log(self, folder: Path, tables: list[Table], plots: dict[str, Path]) -> None:
        """Log the comparison to wandb as a run of the same group."""
        config = self.runs[0].config.tracking
        settings = {"runs": [str(run.path) for run in self.runs], "tracking": asdict(config)}
        tracker = Wandb(
            config, folder, f"{config.group}-comparison", f"{config.group}-comparison", settings, ["comparison"], 0
        )
        for c in self.contexts:
            tracker.log(
                {"length/context": c, **{f"length/{p}": mean(r.at(c) for r in g) for p, g in self.groups.items()}}
            )
        for table in tables:
            tracker.log_table(f"comparison/{table.title}", table.columns, table.rows)
        for name, path in plots.items():
            tracker.log_image(f"comparison/{name}", path)
        tracker.finish()


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 0 auto; padding: 1rem; color: #222; background: #fff; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
th {{ white-space: normal; vertical-align: bottom; }} th:first-child, td:first-child {{ text-align: left; }} img {{ max-width: min(100%, 60rem); height: auto; }} p {{ max-width: 60rem; overflow-wrap: anywhere; }}
</style></head><body><h1>{title}</h1><p>Runs: {runs}</p>{tables}{figures}</body></html>
"""


def compare(config: CompareConfig) -> None:
    """Load the runs, write the report, and print its tables."""
    if not config.runs:
        raise ValueError("no runs given: python scripts/compare.py runs/small-*")
    runs, fine_tuned = ([load_run(name) for name in names] for names in (config.runs, config.fine_tuned))
    comparison, out = Comparison(runs, config.reference, fine_tuned), Path(config.out)
    tables, plots = comparison.write(out)
    if config.wandb:
        comparison.log(out, tables, plots)
    print("\n".join(table.markdown() for table in tables))
    print(f"wrote {out}/report.md, report.html, lengths.csv and {len(plots)} plots")


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 runs that cannot be compared, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Run folders come first, as many as there are.
    arguments = arguments if not arguments or arguments[0].startswith("--") else ["--runs", *arguments]
    arguments = gather_lists(arguments, {"runs", "fine_tuned"})
    config = parse(CompareConfig, arguments, prog="compare.py", description="Compare runs.")
    run_guarded("compare.py", lambda: compare(config), "--debug" in arguments)


if __name__ == "__main__":
    main()
