"""Go on from a prompt: `python scripts/generate.py runs/small-rope --prompt "My fellow citizens"`."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

# So that `python scripts/generate.py` works like `python -m scripts.generate`, from any folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.run_folder import open_model
from configs.schema import ModelOverride, parse, run_guarded
from data.tokenizer import TextStream, end_of_text_id
from model.generation import check_sampling, generate


@dataclass(frozen=True)
class GenerateConfig:
    """What to write."""

    run: str
    """A run folder, whose newest checkpoint is taken, or one of its checkpoints."""
    prompt: str = ""
    """Text to go on from; nothing starts a new document."""
    max_new_tokens: int = 200
    """Tokens to make, unless the text ends before; 0 makes none."""
    temperature: float = 0.8
    """0 always takes the likeliest token; 1 samples from the model as it is."""
    top_k: int = 50
    """Sample among the so many likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    seed: int = 0
    """The same seed gives the same text on the same machine."""
    device: str = "cpu"
    """Where to compute: cpu, mps or cuda."""
    model: ModelOverride = field(default_factory=ModelOverride)

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give 0 or more")


def write(config: GenerateConfig) -> None:
    """Print the prompt and what the model makes of it, as it is made."""
    _, state, tokenizer, model = open_model(config.run, config.model, config.device)
    end_of_text = end_of_text_id(tokenizer)
    ids = tokenizer.encode(config.prompt, add_special_tokens=False).ids or [end_of_text]
    trained = state["context"]
    if len(ids) + config.max_new_tokens > trained:
        print(
            f"note: prompt and text may reach {len(ids) + config.max_new_tokens} tokens; the model was trained on "
            f"{trained} and goes on past them",
            file=sys.stderr,
        )
    generator = torch.Generator(config.device).manual_seed(config.seed)
    stream = TextStream(tokenizer)
    print(config.prompt, end="", flush=True)
    for chosen in generate(
        model,
        torch.tensor([ids], device=config.device),
        config.max_new_tokens,
        generator=generator,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        end_of_text=end_of_text,
    ):
        print(stream.feed(int(chosen)), end="", flush=True)
    print(stream.finish())


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings or files, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    description = "Write text with a trained model."
    config = parse(GenerateConfig, arguments, prog="generate.py", description=description, positional=["run"])
    run_guarded("generate.py", lambda: write(config), "--debug" in arguments)


if __name__ == "__main__":
    main()
