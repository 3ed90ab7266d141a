"""How a run is shown: in Weights & Biases, and as a picture of its length curve."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Seconds to wait for the wandb server before going on offline.
SERVER_TIMEOUT = 30


@dataclass(frozen=True)
class TrackingConfig:
    """How a run appears in Weights & Biases; the run folder is complete without it."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto follows WANDB_MODE if set, else is online where an API key is configured and offline elsewhere."""
    project: str = "ropewalk"
    """wandb project."""
    entity: str | None = None
    """wandb user or team; null is the account's default."""
    group: str = "ropewalk"
    """The comparison this run belongs to; a config file without it gives its own name."""
    tags: tuple[str, ...] = ()
    """Tags beside the position encoding and the group."""
    notes: str | None = None
    """Free text."""


class Wandb:
    """One wandb run, or nothing at all; a failure of wandb is said once and never stops training.

    Args:
        config: the tracking settings.
        run_dir: the run folder; wandb's own files go into its subfolder `wandb`.
        run_name, run_id: how the run is shown and found again when it is resumed.
        settings: all settings of the experiment, sent as wandb's config.
        tags: besides those of `config`.
        logged_step: points up to this step were sent before and are not sent again.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_dir: Path,
        run_name: str,
        run_id: str,
        settings: dict[str, Any],
        tags: Sequence[str],
        logged_step: int,
    ) -> None:
        self.run = None
        self.folder = run_dir / "wandb"
        self.logged_step = logged_step
        mode = config.mode
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if _has_credentials() else "offline")
        if mode == "disabled":
            return
        arguments = {
            "project": config.project,
            "entity": config.entity,
            "group": config.group,
            "name": run_name,
            # The agent of a sweep has chosen an id already.
            "id": os.environ.get("WANDB_RUN_ID", run_id),
            "resume": "allow",
            "tags": [*tags, *config.tags],
            "notes": config.notes,
            "dir": str(run_dir),
            "config": settings,
            "allow_val_change": True,
        }
        for attempt in dict.fromkeys((mode, "offline")):
            if self._start(attempt, arguments):
                break

    def _start(self, mode: str, arguments: dict[str, Any]) -> bool:
        try:
            import wandb

            options = wandb.Settings(console="off", silent=True, init_timeout=SERVER_TIMEOUT)
            # Standard input is not a place to ask for a key: a run in the background would hang.
            self.run = wandb.init(mode=mode, settings=options, **arguments)
            # Tokens are the axis of every curve, and the length curve has its own.
            self.run.define_metric("tokens")
            self.run.define_metric("*", step_metric="tokens")
            self.run.define_metric("length/context", hidden=True)
            self.run.define_metric("length/*", step_metric="length/context")
        except Exception as error:
            _warn(f"wandb does not start in mode {mode} ({_short(error)})")
            return False
        if mode == "offline":
            print(
                f"wandb is offline: look with `wandb leet {self.folder}`, upload with `wandb sync {self.folder}/offline-run-*`"
            )
        elif url := getattr(self.run, "url", None):
            print(f"wandb: {url}")
        return True

    def log(self, values: dict[str, Any]) -> None:
        """Send one point; `values` hold its own axis (`step` and `tokens`, or `length/context`)."""
        if values.get("step", self.logged_step + 1) > self.logged_step:
            self._try(lambda run: run.log(values))

    def log_table(self, key: str, columns: list[str], rows: list[list[Any]]) -> None:
        def send(run: Any) -> None:
            import wandb

            run.log({key: wandb.Table(columns=columns, data=rows)})

        self._try(send)

    def log_image(self, key: str, path: Path) -> None:
        def send(run: Any) -> None:
            import wandb

            run.log({key: wandb.Image(str(path))})

        self._try(send)

    def summarize(self, values: dict[str, Any]) -> None:
        """Set final values, which tables of runs show and sort by."""
        self._try(lambda run: run.summary.update(values))

    def finish(self, exit_code: int = 0) -> None:
        self._try(lambda run: run.finish(exit_code=exit_code))
        self.run = None

    def _try(self, action: Any) -> None:
        if self.run is None:
            return
        try:
            action(self.run)
        except Exception as error:
            _warn(f"wandb failed ({_short(error)}); training goes on and metrics.jsonl stays complete")
            self.run = None


def _has_credentials() -> bool:
    try:
        import wandb

        return wandb.login(prompt=False, verify=False)
    except Exception:
        return False


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


# Okabe and Ito's colours, which colour-blind readers can tell apart, and marks for print without colours.
LOOKS = {"rope": ("#0072B2", "o"), "sinusoidal": ("#D55E00", "s"), "alibi": ("#009E73", "^"), "nope": ("#CC79A7", "v")}


def new_figure(x_label: str, y_label: str, title: str) -> tuple[Any, Any, Callable[[str], dict[str, str]]]:
    """A figure, its axes, and the look of each encoding's line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)

    def style(position: str) -> dict[str, str]:
        color, marker = LOOKS.get(position, ("#E69F00", "D"))
        return {"color": color, "marker": marker, "markersize": 4}

    return figure, axes, style


def mark_trained_length(axes: Any, trained: int, ticks: list[int]) -> None:
    """A logarithmic axis of tokens with the trained length drawn in."""
    axes.axvline(trained, color="0.35", linestyle=":", label=f"trained length L0 = {trained}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def save_figure(figure: Any, axes: Any, path: Path) -> None:
    """Write PNG and SVG."""
    from matplotlib import pyplot

    axes.legend(fontsize=9)
    figure.savefig(path, dpi=150)
    figure.savefig(path.with_suffix(".svg"))
    pyplot.close(figure)


def plot_lengths(lengths: dict[str, Any], position: str, label: str, path: Path) -> None:
    """Draw one run's loss by context, with the trained length and the loss of cropping to it marked."""
    rows, trained = lengths["by_context"], lengths["trained_context"]
    title = f"Loss by context, the same {lengths['targets']:,} held-out targets at every length"
    figure, axes, style = new_figure("context (tokens)", "loss (nats per token)", title)
    axes.plot([row["context"] for row in rows], [row["loss"] for row in rows], label=label, **style(position))
    crop = next((row["loss"] for row in rows if row["context"] == trained), None)
    if crop is not None:
        axes.axhline(crop, color="0.35", linestyle="--", lw=0.8, label="just crop to the trained length")
    mark_trained_length(axes, trained, [row["context"] for row in rows])
    save_figure(figure, axes, path)
