"""A Llama of Hugging Face as a run: `python scripts/import_hf.py FOLDER runs/name`, then scripts/evaluate.py measures it."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.run_folder import describe_machine, refuse_used, write_atomically, write_run_json
from configs.schema import EvalConfig, Experiment, parse, run_guarded, to_yaml
from data.config import DataConfig
from data.tokenizer import fingerprint, load_tokenizer, vocabulary_size
from model import checkpoint
from model.hub import load_llama


@dataclass(frozen=True)
class ImportConfig:
    """What to import."""

    folder: str
    """A folder with config.json, model.safetensors (or its shards) and tokenizer.json."""
    run: str
    """The run folder to make; it must be empty or not exist."""
    context: int | None = None
    """Length the model was trained at; null takes max_position_embeddings of its config.json."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text to measure it on; its tokenizer and context come from the folder."""

    def __post_init__(self) -> None:
        for name, remedy in (
            ("tokenizer", "the model keeps its own"),
            ("context", "give the trained length as --context"),
        ):
            if getattr(self.data, name) != getattr(DataConfig, name):
                raise ValueError(
                    f"data.{name} is {getattr(self.data, name)}, but nothing can be chosen there: {remedy}"
                )


def convert(config: ImportConfig) -> None:
    """Write the run folder."""
    folder, run = Path(config.folder), Path(config.run)
    refuse_used(run)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json: give a folder with a Llama model of Hugging Face")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    model, longest = load_llama(folder)
    if vocabulary_size(tokenizer) > model.vocab_size:
        raise ValueError(
            f"{folder / 'tokenizer.json'} has {vocabulary_size(tokenizer)} ids and the model {model.vocab_size}: "
            "they do not belong together"
        )
    context = config.context or longest
    shortest = round(min(EvalConfig.length_ratios) * context)
    experiment = Experiment(
        model=model.config,
        data=replace(config.data, tokenizer=str(run.resolve() / "tokenizer.json"), context=context),
        eval=EvalConfig(length_block=max(1, min(EvalConfig.length_block, shortest))),
        name=run.resolve().name,
        out_dir=str(run.parent),
    )
    state = {"step": 0, "tokens": 0, "pending": [], "val_loss": None, "context": context, "data_fingerprint": None}
    state["tokenizer_sha256"] = fingerprint(tokenizer)
    checkpoint.save(run / "checkpoints", model, {}, state)
    write_atomically(run / "tokenizer.json", tokenizer.to_str())
    write_run_json(run, status="imported", imported_from=str(folder.resolve()), **describe_machine("cpu"))
    write_atomically(run / "config.yaml", to_yaml(experiment))
    rope, parameters = model.config.rope, sum(p.numel() for p in model.parameters())
    print(
        f"{run}: a Llama of {parameters:,} parameters, trained length {context}, RoPE base {rope.theta}, "
        f"stretching {rope.scaling.kind}\nnext:\n  python scripts/evaluate.py {run}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings or files, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    description = "Make a run folder of a Llama model."
    config = parse(ImportConfig, arguments, prog="import_hf.py", description=description, positional=["folder", "run"])
    run_guarded("import_hf.py", lambda: convert(config), "--debug" in arguments)


if __name__ == "__main__":
    main()
