"""Draw the two pictures of docs/rope.md from the encodings themselves: `python scripts/draw_encodings.py`."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.schema import parse
from model.config import ModelConfig, RopeConfig, ScalingConfig
from model.positions import encoding_class
from model.positions.rope import rope_frequencies

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class DrawConfig:
    """What to draw."""

    out: str = "docs"
    """Folder for rotation-angles.png and scores-by-distance.png."""
    head_dim: int = 32
    """Head dim; 32 is that of small.yaml."""
    trained_length: int = 128
    """Trained length L0, marked in both pictures."""
    positions: int = 512
    """How far to draw."""


def draw_angles(config: DrawConfig, path: Path) -> None:
    """The rotation angle of every pair at every position, modulo a full turn."""
    from matplotlib import pyplot

    frequencies = rope_frequencies(config.head_dim)
    angles = (torch.arange(config.positions)[None] * frequencies[:, None]) % (2 * math.pi)
    turning_once = int((config.trained_length * frequencies >= 2 * math.pi).sum())
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    image = axes.imshow(angles, aspect="auto", cmap="twilight", vmin=0, vmax=2 * math.pi, interpolation="nearest")
    axes.axvline(config.trained_length, color="white", linestyle="--", linewidth=2)
    axes.axvline(config.trained_length, color="black", linestyle="--", linewidth=1)
    axes.text(config.trained_length + 5, -0.8, f"trained length L0 = {config.trained_length}", fontsize=9)
    axes.axhline(turning_once - 0.5, color="black", linewidth=1)
    axes.set_yticks(range(0, len(frequencies), 3))
    axes.set_xlabel("position p (tokens)")
    axes.set_ylabel("pair k (0 is the fastest)")
    axes.set_title(
        f"Angle p θ_k, head dim {config.head_dim}: above the line, {turning_once} of {len(frequencies)} pairs finish a turn "
        "within L0;\nbelow it, positions past L0 begin with angles that the model never met in training\n",
        fontsize=10,
        loc="left",
    )
    bar = figure.colorbar(image, label="angle (radians, modulo 2π)", ticks=[0, math.pi, 2 * math.pi])
    bar.ax.set_yticklabels(["0", "π", "2π"])
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def score(config: ModelConfig, query_position: int, distances: Tensor, head: int = 0) -> Tensor:
    """Attention score of a query at `query_position` with the key `distances` before it, both of equal content.

    Content is the all-ones vector of unit length in every head; what the encoding does to it in embed,
    rotate and bias is all that differs.
    """
    positions = (query_position - distances)[None]
    query = torch.tensor([[query_position]])
    content = torch.ones(1, len(distances), config.dim) / math.sqrt(config.dim)
    at_query = encoding_class(config.position)(config, query, positions)
    at_keys = encoding_class(config.position)(config, positions, positions)
    q, k = at_query.embed(content[:, :1]), at_keys.embed(content)
    q, k = (
        q.unflatten(-1, (-1, config.head_dim)).transpose(1, 2),
        k.unflatten(-1, (-1, config.head_dim)).transpose(1, 2),
    )
    q, k = at_query.rotate(q), at_keys.rotate(k)
    scores = (q @ k.transpose(-1, -2) * config.n_heads)[0, head, 0]
    bias = at_query.bias()
    return scores if bias is None else scores + bias[0, head, 0]


def draw_scores(config: DrawConfig, path: Path) -> None:
    """The score of one query and one key of fixed content against their distance, under each encoding."""
    from matplotlib import pyplot

    distances = torch.arange(config.positions)
    shape = {"dim": 4 * config.head_dim, "n_heads": 4}

    def rope(kind: str) -> ModelConfig:
        scaling = ScalingConfig(kind, 1.0 if kind == "none" else 4.0, config.trained_length)
        return ModelConfig(**shape, rope=RopeConfig(scaling=scaling))

    sinusoidal = ModelConfig(**shape, position="sinusoidal", embedding_rms=1 / math.sqrt(shape["dim"]))
    alibi = ModelConfig(**shape, position="alibi")
    far = config.positions - 1
    # title, then label, model, query position and head of each line
    panels = [
        ("RoPE: one curve for every query position", [("RoPE", rope("none"), far, 0)]),
        ("RoPE stretched by 4", [(kind, rope(kind), far, 0) for kind in ("linear", "yarn")]),
        (
            "sinusoidal: another curve at every query position",
            [(f"query at {p}", sinusoidal, p, 0) for p in (far, far + 4000)],
        ),
        ("ALiBi: one slope a head", [(f"head {h}", alibi, far, h) for h in range(4)]),
    ]
    figure, grid = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex=True)
    for axes, (title, lines) in zip(grid.flat, panels, strict=True):
        for (label, model, position, head), color, style in zip(lines, COLORS, STYLES, strict=False):
            axes.plot(
                distances, score(model, position, distances, head), color=color, linestyle=style, label=label, lw=1.2
            )
        axes.axvline(config.trained_length, color="0.35", linestyle=":", label="L0")
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("score q·k")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    for axes in grid[1]:
        axes.set_xlabel("distance between query and key (tokens)")
    figure.suptitle(f"Score of one fixed q and k by distance; L0: trained length {config.trained_length}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Write both pictures."""
    import matplotlib

    matplotlib.use("Agg")
    arguments = sys.argv[1:] if arguments is None else arguments
    config = parse(DrawConfig, arguments, prog="draw_encodings.py", description="Draw the pictures of docs/rope.md.")
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    draw_angles(config, folder / "rotation-angles.png")
    draw_scores(config, folder / "scores-by-distance.png")
    print(f"wrote {folder / 'rotation-angles.png'} and {folder / 'scores-by-distance.png'}")


if __name__ == "__main__":
    main()
