"""Go on from a prompt: `python scripts/generate.py runs/small-rope --prompt "My fellow citizens"`."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

# So that `python scripts/generate.py` works like `python -m scripts.generate`, from any folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.run_folder import open_model
from configs.schema import ModelOverride, parse, run_guarded
from data.tokenizer import TextStream, end_of_text_id, vocabulary_size
from model.device import choose_device, compiled_or_plain, keep_freed_memory
from model.generation import check_sampling, generate


@dataclass(frozen=True)
class GenerateConfig:
    """What to write."""

    run: str
    """A run folder, whose newest checkpoint is taken, or one of its checkpoints."""
    prompt: str | None = None
    """Text to go on from; nothing starts a new document."""
    prompt_file: str | None = None
    """File whose whole text is the prompt; - reads standard input."""
    prompts_file: str | None = None
    """File with a prompt on every line, all gone on from at once; - reads standard input."""
    interactive: bool = False
    """Ask for prompts until the end of input (Ctrl-D); Ctrl-C stops an answer."""
    samples: int = 1
    """Texts for each prompt, made at once, from seed, seed + 1, ..."""
    max_new_tokens: int = 200
    """Tokens to make, unless the text ends before; 0 makes none."""
    temperature: float = 0.8
    """0 always takes the likeliest token; 1 samples from the model as it is."""
    top_k: int = 50
    """Sample among the so many likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    seed: int = 0
    """The same seed gives the same text on the same machine, however many texts are made beside it."""
    json: bool = False
    """Print a line of JSON for every text, for other programs."""
    compile: bool = False
    """Compile the step of one token: worth its half a minute for long texts only."""
    device: str = "cpu"
    """Where to compute: auto, cpu, mps, cuda or cuda:N."""
    model: ModelOverride = field(default_factory=ModelOverride)

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give 0 or more")
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}: give 1 or more")
        if not 0 <= self.seed < 2**63 - self.samples:
            raise ValueError(f"seed is {self.seed}: give a whole number from 0 to 2^63 - 1")
        given = [name for name in ("prompt", "prompt_file", "prompts_file") if getattr(self, name) is not None]
        given += ["interactive"] if self.interactive else []
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: choose one")
        if self.interactive and self.json:
            raise ValueError("interactive and json are given: choose one")


class Writer:
    """A loaded model that goes on from prompts in the way of `config`."""

    def __init__(self, config: GenerateConfig) -> None:
        keep_freed_memory()
        self.config = config
        self.device = choose_device(config.device)
        _, state, self.tokenizer, self.model = open_model(config.run, config.model, self.device)
        self.trained = state["context"]
        self.end_of_text = end_of_text_id(self.tokenizer)
        self.forward = compiled_or_plain(self.model.last_logits) if config.compile else None
        self.noted = False

    def encode(self, prompt: str) -> list[int]:
        """Ids of a prompt, which may quote special tokens as text; an empty one starts a document."""
        return self.tokenizer.encode(prompt, add_special_tokens=False).ids or [self.end_of_text]

    def go_on(self, prompts: list[str]) -> Iterator[list[int | None]]:
        """New ids, step by step, with a row for every sample of every prompt."""
        config, ids = self.config, [self.encode(prompt) for prompt in prompts]
        longest = max(map(len, ids)) + config.max_new_tokens
        if longest > self.trained and not self.noted:
            self.noted = True
            note = f"note: prompt and text may reach {longest} tokens; the model was trained on {self.trained} and goes on past them"
            print(note, file=sys.stderr)
        seeds = [config.seed + number for _ in prompts for number in range(config.samples)]
        return generate(
            self.model,
            [row for row in ids for _ in range(config.samples)],
            config.max_new_tokens,
            generators=[torch.Generator(self.device).manual_seed(seed) for seed in seeds],
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            end_of_text=self.end_of_text,
            vocab_size=vocabulary_size(self.tokenizer),
            forward=self.forward,
        )

    def stream(self, prompt: str) -> None:
        """Print a prompt and its text as it is made, never half a character."""
        stream, steps = TextStream(self.tokenizer), self.go_on([prompt])
        print(prompt, end="", flush=True)
        for (chosen,) in steps:
            print(stream.feed(chosen), end="", flush=True)
        print(stream.finish())

    def texts(self, prompts: list[str]) -> Iterator[dict[str, object]]:
        """Every text once all are made: prompt, sample, text, tokens, and whether it ended by itself."""
        made: list[list[int]] = [[] for _ in range(len(prompts) * self.config.samples)]
        for step in self.go_on(prompts):
            for row, chosen in zip(made, step, strict=True):
                row += [] if chosen is None else [chosen]
        for number, row in enumerate(made):
            prompt, sample = divmod(number, self.config.samples)
            stream, ended = TextStream(self.tokenizer), row[-1:] == [self.end_of_text]
            yield {
                "prompt": prompts[prompt],
                "sample": sample,
                "seed": self.config.seed + sample,
                "text": "".join(map(stream.feed, row)) + stream.finish(),
                "tokens": len(row),
                "finish": "end_of_text" if ended else "length",
            }


def read(path: str) -> str:
    """The text of a file or of standard input; ValueError if it cannot be read or is no UTF-8."""
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): give a text file, or - for standard input"
        ) from None


def converse(answer: Callable[[str], None]) -> None:
    """Read prompts with line editing and answer them; Ctrl-C stops the answer, Ctrl-D the program."""
    try:
        import readline  # noqa: F401, input() edits lines once it is there
    except ImportError:
        pass
    print("Write a prompt and press Enter. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
            answer(prompt)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def write(config: GenerateConfig) -> None:
    """Print what the model makes of the prompts."""
    prompts = [config.prompt or ""]
    if config.prompt_file is not None:
        prompts = [read(config.prompt_file)]
    if config.prompts_file is not None:
        prompts = read(config.prompts_file).splitlines()
        if not prompts:
            raise ValueError(f"{config.prompts_file} holds no line: write a prompt on every line")
    writer = Writer(config)
    if config.interactive:
        converse(writer.stream)
    elif config.json:
        for text in writer.texts(prompts):
            print(json.dumps(text, ensure_ascii=False))
    elif len(prompts) * config.samples == 1:
        writer.stream(prompts[0])
    else:
        for number, text in enumerate(writer.texts(prompts)):
            print(f"--- prompt {number // config.samples + 1}, sample {text['sample'] + 1}")
            print(f"{text['prompt']}{text['text']}")


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings or files, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    description = "Write text with a trained model."
    config = parse(GenerateConfig, arguments, prog="generate.py", description=description, positional=["run"])
    run_guarded("generate.py", lambda: write(config), "--debug" in arguments)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `| head` has read enough: end without a word, as other programs do
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
