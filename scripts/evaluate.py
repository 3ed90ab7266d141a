"""What is left of a model past its trained length: `python scripts/evaluate.py runs/small-rope`.

Four measurements on held-out documents, each inside one document, written to lengths.json of the run:
loss by context on the same targets, plain and with every way of stretching RoPE or limiting attention;
loss by position; and how much an earlier copy of a passage helps, by its distance.
"""

import itertools
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.record import length_table
from configs.run_folder import write_atomically
from configs.schema import Experiment, interactive, parse, parse_experiment, run_guarded
from configs.tracking import plot_lengths
from data import batches
from data.prepare import PreparedData, prepare
from data.tokenizer import byte_lengths
from model import checkpoint
from model.config import SCALING_KINDS, ScalingConfig
from model.device import choose_device, keep_freed_memory
from model.scoring import measure, score, score_windows
from model.transformer import Transformer
from train import block_ends, measure_lengths, reader

# Ends of the position buckets, and gaps of the copy measurement, as multiples of the trained length.
BUCKETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 3, 4, 6, 8, 12, 16)
GAPS = (1 / 4, 1 / 2, 3 / 4, 1, 3 / 2, 2, 4, 8, 15)


@dataclass(frozen=True)
class EvaluateConfig:
    """What to measure."""

    run: str
    """A run folder; its newest checkpoint is measured."""
    targets: int = 8192
    """Targets of the loss by context, the same for every context and variant."""
    copies: int = 128
    """Passages of the copy measurement."""
    batch_tokens: int = 8192
    """Tokens in one forward pass; the results do not depend on it."""
    variants: bool = True
    """Measure also every way of stretching RoPE, and attention limited to the trained length."""
    device: str = "auto"
    """Where to compute: cpu, mps, cuda or cuda:N; auto takes the fastest that is there."""

    def __post_init__(self) -> None:
        if min(self.targets, self.copies, self.batch_tokens) < 1:
            raise ValueError("targets, copies and batch_tokens must be 1 or more")


def variants(position: str) -> list[str]:
    """Ways of reading past the trained length without training: window for all, stretching for RoPE."""
    return ["window", *(kind for kind in SCALING_KINDS if kind != "none" and position == "rope")]


def by_variant(
    path: Path, config: EvaluateConfig, experiment: Experiment, data: PreparedData, contexts: list[int]
) -> dict[str, list[dict]]:
    """Loss by context of every variant on the targets of the plain curve, for contexts past the trained length.

    The scaling factor at context c is c / L0.
    """
    read, trained = reader(data.tokens("val")), experiment.data.context
    token_bytes = torch.from_numpy(byte_lengths(data.tokenizer))
    ends = block_ends(data, experiment, contexts)
    block, device = experiment.eval.length_block, choose_device(config.device)
    found: dict[str, list[dict]] = {}
    jobs = [
        (name, context) for name in variants(experiment.model.position) for context in contexts if context > trained
    ]
    for name, context in tqdm(jobs, desc="variants", unit="curve point", disable=not interactive()):
        scaling = None if name == "window" else ScalingConfig(kind=name, factor=context / trained)
        model = checkpoint.load_model(path, device, scaling, trained if name == "window" else None)
        row = measure(model, read, ends - context, context, block, token_bytes, config.batch_tokens, nullcontext())
        found.setdefault(name, []).append(
            {"context": context, "loss": row["loss"], "bits_per_byte": row["bits_per_byte"]}
        )
    return found


def by_position(
    model: Transformer, config: EvaluateConfig, experiment: Experiment, data: PreparedData, longest: int
) -> dict:
    """Mean loss of the tokens at each place of long windows, in buckets of places."""
    trained = experiment.data.context
    ends = batches.block_ends(data.document_starts("val"), longest, longest, max(longest, 8 * config.targets))
    read = reader(data.tokens("val"))
    scored = score_windows(model, read, ends - longest, longest, longest, config.batch_tokens, nullcontext())
    nats = torch.cat([losses for losses, _ in scored]).double()
    edges = [0, *sorted({min(longest, max(1, round(ratio * trained))) for ratio in BUCKETS})]
    return {
        "window": longest,
        "windows": len(ends),
        "buckets": [
            {"from": a, "to": b, "loss": nats[:, a:b].mean().item(), "targets": nats[:, a:b].numel()}
            for a, b in itertools.pairwise(edges)
        ],
    }


def copy_gain(
    model: Transformer, config: EvaluateConfig, experiment: Experiment, data: PreparedData, longest: int
) -> dict:
    """How many nats per token a passage costs less because it stood earlier, by the gap to that first time.

    Each sequence is a passage, other held-out text, and the passage again; the gap counts tokens from a token
    to its copy. The first token of a passage is not scored, since nothing tells which passage comes. `gain` is
    the loss at the first time minus that at the second, which mixes the copy with what a far position alone does to
    the model; `gain_in_place` compares with the same tokens at the same place after a first passage that is another.
    """
    read, trained, device = reader(data.tokens("val")), experiment.data.context, model.embedding.weight.device
    length = max(2, trained // 8)
    ends = batches.block_ends(data.document_starts("val"), longest, length, config.copies * length)
    passages = read(ends - length, length)[0]
    # Filler comes from another place: that of the passage half the list away.
    fillers = read(np.roll(ends, len(ends) // 2) - longest, longest)[0]

    def ends_of(sequences: torch.Tensor) -> tuple[float, float]:
        """Mean loss of the first and of the last passage of each sequence."""
        size = max(1, config.batch_tokens // sequences.shape[1])
        parts = [part.to(device) for part in sequences.split(size)]
        losses = torch.cat([score(model, part[:, :-1], part[:, 1:]).cpu() for part in parts]).double()
        return losses[:, : length - 1].mean().item(), losses[:, -(length - 1) :].mean().item()

    rows = []
    for gap in sorted(
        {round(ratio * trained) for ratio in GAPS if length < round(ratio * trained) <= longest - length}
    ):
        first, second = ends_of(torch.cat((passages, fillers[:, : gap - length], passages), dim=1))
        _, without = ends_of(torch.cat((passages.roll(1, 0), fillers[:, : gap - length], passages), dim=1))
        row = {"gap": gap, "first": first, "second": second, "without_copy": without}
        rows.append({**row, "gain": first - second, "gain_in_place": without - second})
    return {"passage": length, "passages": len(ends), "rows": rows}


def evaluate(config: EvaluateConfig) -> dict:
    """All four measurements of a run; written to its lengths.json and returned."""
    run = Path(config.run)
    if not run.is_dir():
        raise FileNotFoundError(f"{run} does not exist: give a run folder such as runs/small-rope")
    keep_freed_memory()
    path = checkpoint.latest(run)
    arguments = [f"--eval.length_targets={config.targets}", f"--eval.batch_tokens={config.batch_tokens}"]
    experiment = parse_experiment(["--config", str(run / "config.yaml"), *arguments])
    if experiment.data.tokenizer:  # the run's own copy is the same one, and moves with it
        experiment = replace(experiment, data=replace(experiment.data, tokenizer=str(run / "tokenizer.json")))
    data = prepare(experiment.data)
    state = checkpoint.read_state(path)
    # An imported model has no data of its own.
    if data.manifest["tokenizer_sha256"] != state["tokenizer_sha256"] or state["data_fingerprint"] not in (
        None,
        data.manifest["fingerprint"],
    ):
        raise ValueError(
            f"{path} was trained on other data than its settings give now: bring back the text, or train it again"
        )
    model = checkpoint.load_model(path, choose_device(config.device))
    lengths = {
        "checkpoint": path.name,
        "step": state["step"],
        **measure_lengths(model, data, experiment, nullcontext()),
    }
    contexts = [row["context"] for row in lengths["by_context"]]
    if not contexts or contexts[-1] <= experiment.data.context:
        raise ValueError(
            f"no held-out document is longer than the trained length of {experiment.data.context} tokens, so nothing past "
            "it can be measured: use longer documents, or train with a smaller data.context"
        )
    if config.variants:
        lengths["variants"] = by_variant(path, config, experiment, data, contexts)
    lengths["by_position"] = by_position(model, config, experiment, data, contexts[-1])
    lengths["copy_gain"] = copy_gain(model, config, experiment, data, contexts[-1])
    write_atomically(run / "lengths.json", json.dumps(lengths, indent=2) + "\n")
    plot_lengths(lengths, experiment.model.position, run.name, run / "lengths.png")
    return lengths


def tables(lengths: dict) -> str:
    """The measurements as text."""
    lines = [length_table(lengths)]
    if found := lengths.get("variants"):
        past = [row for row in lengths["by_context"] if row["context"] > lengths["trained_context"]]
        lines += ["", "Variants without training, nats/token on the same targets (factor = context / trained length)"]
        lines.append(f"{'context':>9} {'plain':>9} " + " ".join(f"{name:>9}" for name in found))
        for number, row in enumerate(past):
            values = " ".join(f"{rows[number]['loss']:>9.4f}" for rows in found.values())
            lines.append(f"{row['context']:>9} {row['loss']:>9.4f} {values}")
    places = lengths["by_position"]
    lines += ["", f"Loss by position: {places['windows']} windows of {places['window']} tokens"]
    lines += [f"{b['from']:>9} to {b['to']:<6} {b['loss']:>9.4f}" for b in places["buckets"]]
    copies = lengths["copy_gain"]
    lines += ["", f"Copy gain: {copies['passages']} passages of {copies['passage']} tokens, nats/token"]
    columns = list(copies["rows"][0])
    lines += [" ".join(f"{name:>13}" for name in columns)]
    lines += [f"{r['gap']:>13} " + " ".join(f"{r[name]:>13.4f}" for name in columns[1:]) for r in copies["rows"]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings or runs, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    description = "Measure a run past its trained length."
    config = parse(EvaluateConfig, arguments, prog="evaluate.py", description=description, positional=["run"])
    run_guarded("evaluate.py", lambda: print(tables(evaluate(config))), "--debug" in arguments)


if __name__ == "__main__":
    main()
