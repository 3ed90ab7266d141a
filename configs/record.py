"""What the first process of a training run writes and says: its folder, metrics.jsonl, wandb, and the terminal."""

import json
import os
from dataclasses import asdict, replace
from typing import Any

from configs.run_folder import (
    Hold,
    Metrics,
    cut_samples,
    describe_machine,
    refuse_other_run,
    write_atomically,
    write_run_json,
)
from configs.schema import Experiment, to_yaml
from configs.tracking import Wandb, plot_lengths
from data.prepare import PreparedData


def length_table(lengths: dict) -> str:
    """The length curve as text."""
    trained = lengths["trained_context"]
    lines = [
        f"Loss by context: the same {lengths['targets']:,} targets ({lengths['bytes']:,} bytes, "
        f"{lengths['documents']} held-out documents) at every length; trained at {trained}",
        f"{'context':>9} {'x trained':>10} {'nats/token':>11} {'bits/byte':>10} {'perplexity':>11}",
    ]
    for row in lengths["by_context"]:
        mark = "  <- trained length; longer contexts must beat this" if row["context"] == trained else ""
        lines.append(
            f"{row['context']:>9} {row['context'] / trained:>10.2f} {row['loss']:>11.4f} "
            f"{row['bits_per_byte']:>10.4f} {row['perplexity']:>11.2f}{mark}"
        )
    if lengths["skipped_contexts"]:
        skipped = ", ".join(map(str, lengths["skipped_contexts"]))
        lines.append(f"left out, longer than any held-out document: {skipped}")
    return "\n".join(lines)


class Record:
    """The record of one run; its folder is held for this process from the beginning. `begin` before the rest.

    Args:
        parameters: of the model.

    SettingsError if the folder holds another run, or another process trains in it.
    """

    def __init__(self, config: Experiment, parameters: int) -> None:
        self.config, self.run_dir, self.parameters = config, config.run_dir, parameters
        self.hold: Hold | None = Hold(self.run_dir)
        self.changed = refuse_other_run(config)  # again: another process may have begun since
        name, seed = config.run_name, f"-s{config.seed}"
        self.seeded_name = name if seed in name else name + seed

    def begin(self, step: int, data: PreparedData, processes: int, device: str) -> None:
        """Write what is known, and open metrics and wandb to go on from `step`."""
        config, run_dir, self.device = self.config, self.run_dir, device
        write_atomically(run_dir / "config.yaml", to_yaml(replace(config, resume=False)))
        write_atomically(run_dir / "tokenizer.json", data.tokenizer.to_str())
        facts = write_run_json(run_dir, status="running", processes=processes, **describe_machine(device))
        if "wandb_id" not in facts:
            facts = write_run_json(run_dir, wandb_id=os.urandom(6).hex())
        if self.changed:
            print(f"changed since the run was started or last resumed: {'; '.join(self.changed)}")
            write_run_json(run_dir, changes=[*facts.get("changes", []), {"step": step, "settings": self.changed}])
        cut_samples(run_dir / "samples.txt", step)
        self.metrics = Metrics(run_dir / "metrics.jsonl", step)
        self.tracker = Wandb(
            config.tracking,
            run_dir,
            self.seeded_name,
            facts["wandb_id"],
            {**asdict(config), "parameters": self.parameters},
            [config.model.position, config.tracking.group],
            self.metrics.last_step,
        )

    def log(self, point: dict[str, Any]) -> None:
        self.metrics.write(point)
        self.tracker.log(point)

    def log_sample(self, step: int, text: str) -> None:
        with (self.run_dir / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}\n{text}\n")
        self.tracker.log_table("samples", ["step", "text"], [[step, text]])

    def log_lengths(self, lengths: dict) -> None:
        """The length curve: as a file, a picture, points with their own axis, a table, and final values."""
        write_atomically(self.run_dir / "lengths.json", json.dumps(lengths, indent=2) + "\n")
        rows, picture = lengths["by_context"], self.run_dir / "lengths.png"
        if not rows:
            return
        plot_lengths(lengths, self.config.model.position, self.seeded_name, picture)
        for row in rows:
            self.tracker.log({f"length/{name}": value for name, value in row.items()})
        self.tracker.log_table("length/table", list(rows[0]), [list(row.values()) for row in rows])
        self.tracker.log_image("length/curve", picture)
        self.tracker.summarize({f"length/loss_at_{row['context']}": row["loss"] for row in rows})

    def end(self, status: str, exit_code: int = 0) -> None:
        self.tracker.finish(exit_code)
        write_run_json(self.run_dir, status=status)
        self.hold = None

    def print_start(
        self, data: PreparedData, processes: int, micro_batch_size: int, windows: int, decayed: int
    ) -> None:
        config, manifest, batch = self.config, data.manifest, self.config.train.batch_size
        team, passes = f"{processes} processes x " if processes > 1 else "", batch // processes // micro_batch_size
        print(
            f"{to_yaml(config)}"
            f"data: {manifest['train']['documents']} training documents of {manifest['train']['tokens']:,} tokens, "
            f"{manifest['val']['documents']} held out of {manifest['val']['tokens']:,}; "
            f"vocabulary {manifest['vocab_size']} (asked for {config.data.tokenizer or config.data.vocab_size}), in {data.folder}\n"
            f"model: {config.model.position}, {self.parameters:,} parameters, {decayed:,} of them with weight decay, on {self.device.partition(' ')[0]}\n"
            f"step: {batch * config.data.context:,} tokens = {team}{passes} x {micro_batch_size} sequences x {config.data.context}; "
            f"{config.train.steps} steps = {config.train.steps * batch / windows:.2f} epochs"
        )

    def print_end(self, step: int, tokens: int, lengths: dict) -> None:
        config, run_dir = self.config, self.run_dir
        other = "sinusoidal" if config.model.position == "rope" else "rope"
        other += f" --name {config.name}-{other}" if config.name else ""
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        last = [json.loads(line) for line in lines if '"val/loss"' in line][-1]
        print(
            f"{length_table(lengths)}\n\n"
            f"{config.run_name}: {last['val/loss']:.4f} nats/token, {last['val/bits_per_byte']:.4f} bits/byte on held-out text "
            f"after {step} steps, {tokens:,} tokens. All of it is in {run_dir}\n"
            f"next:\n"
            f'  python scripts/generate.py {run_dir} --prompt "My fellow citizens"\n'
            f"  python scripts/evaluate.py {run_dir}\n"
            f"  python train.py --config {run_dir}/config.yaml --model.position {other}"
            + (f"\n  wandb leet {run_dir}/wandb" if (run_dir / "wandb").is_dir() else "")
        )
