"""A folder that transformers loads: `python scripts/export_hf.py runs/small-rope runs/small-rope-hf` (docs/export.md)."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.record import length_table
from configs.run_folder import open_model, refuse_used
from configs.schema import ModelOverride, SettingsError, parse, run_guarded
from data.tokenizer import end_of_text_id
from model.hub import llama_config, to_llama


@dataclass(frozen=True)
class ExportConfig:
    """What to export."""

    run: str
    """A run folder, whose newest checkpoint is taken, or one of its checkpoints."""
    out: str
    """The folder to make; it must be empty or not exist."""
    push_to: str | None = None
    """Upload it too, to this repository of the Hugging Face hub, such as user/name; needs `hf auth login`."""
    model: ModelOverride = field(default_factory=ModelOverride)


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [ropewalk]
---
# {run.name}

A LLaMA-style language model of {parameters:,} parameters, trained with ropewalk to study position encodings.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{place}"), AutoModelForCausalLM.from_pretrained("{place}")
ids = tokenizer("The", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=100, do_sample=True, temperature=0.8)[0]))
```

## Training

{state[tokens]:,} tokens in {state[step]:,} steps, in windows of {state[context]} tokens. On held-out text: {loss}.
Its data and recipe are in the settings of the run:

```yaml
{settings}```

## Length

RoPE as exported: `{rope}`. The table is of the model as it was trained.

```text
{lengths}
```

## Limits

A small model for experiments: what it writes is not to be relied on, and repeats what its data says. Past {state[context]}
tokens it gets worse unless the table says otherwise. Training windows ran across documents, each of which ends with
`{end_of_text}`; quoted in a text, that string is plain text. The license of the data is not decided here.
"""


def card(run: Path, state: dict, **known: object) -> str:
    """The model card, from what the run folder knows."""
    lengths, metrics, loss = run / "lengths.json", run / "metrics.jsonl", "not measured"
    for line in metrics.read_text().splitlines() if metrics.is_file() else []:
        point = json.loads(line)
        if "val/loss" in point and point["step"] == state["step"]:
            loss = f"{point['val/loss']:.4f} nats per token, {point['val/bits_per_byte']:.4f} bits per byte"
    table = length_table(json.loads(lengths.read_text())) if lengths.is_file() else "not measured"
    settings = (run / "config.yaml").read_text()
    return CARD.format(run=run, state=state, loss=loss, settings=settings, lengths=table, **known)


def export(config: ExportConfig) -> None:
    """Write the folder, and upload it if asked to."""
    out = Path(config.out)
    refuse_used(out)
    if config.push_to:
        import huggingface_hub

        if huggingface_hub.get_token() is None:
            raise SettingsError(f"push_to is {config.push_to}, but you are not logged in: run hf auth login first")
    path, state, tokenizer, model = open_model(config.run, config.model)
    values, end = llama_config(model.config, model.vocab_size, state["context"]), end_of_text_id(tokenizer)
    weights, name, ends = to_llama(model), tokenizer.id_to_token(end), {"bos_token_id": end, "eos_token_id": end}
    # Under dynamic stretching, keys cached while the text was shorter are wrong.
    generation = {**ends, "pad_token_id": end, "use_cache": model.config.rope.scaling.kind != "dynamic"}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name,
        "eos_token": name,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text that quotes the end-of-text token does not end there
        "model_max_length": values["max_position_embeddings"],
    }
    known = {"parameters": sum(tensor.numel() for tensor in weights.values()), "rope": values["rope_parameters"]}
    text = card(path.resolve().parent.parent, state, end_of_text=name, place=config.push_to or config.out, **known)
    out.mkdir(parents=True, exist_ok=True)
    for file, content in (
        ("config.json", json.dumps(values | ends, indent=2)),
        ("generation_config.json", json.dumps(generation, indent=2)),
        ("tokenizer_config.json", json.dumps(tokenizer_config, indent=2)),
        ("tokenizer.json", tokenizer.to_str()),
        ("README.md", text),
    ):
        (out / file).write_text(content, encoding="utf-8")
    (out / "model.safetensors").write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
    print(f"{path} is in {out}: a Llama of {known['parameters']:,} parameters, RoPE {known['rope']}")
    if config.push_to:
        huggingface_hub.create_repo(config.push_to, exist_ok=True)
        print(huggingface_hub.upload_folder(repo_id=config.push_to, folder_path=out))


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings or files, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    description = "Write a trained model as a folder that transformers loads."
    config = parse(ExportConfig, arguments, prog="export_hf.py", description=description, positional=["run", "out"])
    run_guarded("export_hf.py", lambda: export(config), "--debug" in arguments)


if __name__ == "__main__":
    main()
