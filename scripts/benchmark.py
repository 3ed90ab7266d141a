"""How fast it is: `python scripts/benchmark.py` times a training step beside the same model in transformers;
`benchmark.py encodings` under every position encoding; `benchmark.py generate` the making of text.

All contenders do the same work in one process, taking turns, so that a busy machine slows all of them. The figures
to read are the ratios.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.schema import Experiment, parse, parse_experiment, run_guarded
from model.device import compiled_or_plain, keep_freed_memory
from model.generation import generate
from model.hub import llama_config, to_llama
from model.positions import ENCODINGS
from model.scoring import token_losses
from model.transformer import Transformer
from train import make_optimizer


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to time."""

    what: Literal["train", "encodings", "generate"]
    """A training step beside transformers, or of every encoding; or making text."""
    shape: str = "small.yaml"
    """Config file whose model, context and batch size are timed."""
    batch_size: int | None = None
    """Sequences a step; null takes the config's."""
    rounds: int = 15
    """How often the contenders take turns; the medians over rounds are reported."""
    steps: int = 10
    """Training steps a turn."""
    new_tokens: int = 512
    """Tokens of a text."""
    compile: bool = False
    """Time a compiled form of our generation too."""
    vocab_size: int = 2048
    """Token ids of all models."""

    def __post_init__(self) -> None:
        if min(self.rounds, self.steps, self.new_tokens) < 1:
            raise ValueError("rounds, steps and new_tokens must be 1 or more")


@dataclass(frozen=True)
class Contender:
    """Something to time."""

    turn: Callable[[], None]
    tokens: int
    """Tokens of one turn."""
    parameters: int


def llama_of(model: Transformer, context: int) -> torch.nn.Module:
    """The same model in transformers. ValueError if that is not installed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ValueError("the comparison needs transformers: pip install -r requirements-dev.txt") from None
    llama = LlamaForCausalLM(LlamaConfig(**llama_config(model.config, model.vocab_size, context)))
    llama.load_state_dict(to_llama(model), strict=False)
    llama.tie_weights()
    return llama


def trainers(config: BenchmarkConfig, experiment: Experiment) -> dict[str, Contender]:
    """Training loops on one batch: forward, loss, backward, clipping, fused AdamW, in fp32."""
    batch, context = config.batch_size or experiment.train.batch_size, experiment.data.context
    ids = torch.randint(config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def contender(model: torch.nn.Module, forward: Callable) -> Contender:
        optimizer, parameters = make_optimizer(model, experiment.train), list(model.parameters())

        def turn() -> None:
            for _ in range(config.steps):
                optimizer.zero_grad(set_to_none=True)
                loss = token_losses(forward(x), y).sum() / y.numel()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, experiment.train.grad_clip)
                optimizer.step()

        return Contender(turn, config.steps * batch * context, sum(p.numel() for p in parameters))

    def ours(position: str) -> Transformer:
        return Transformer(replace(experiment.model, position=position), config.vocab_size)

    if config.what == "encodings":
        return {position: contender(model, model) for position in ENCODINGS for model in [ours(position)]}
    # Plain LLaMA embeddings, so that both have one matrix for embedding and head.
    plain = Transformer(replace(experiment.model, position="rope", embedding_rms=0.02), config.vocab_size)
    llama = llama_of(plain, context)
    return {
        "transformers Llama": contender(llama, lambda x: llama(input_ids=x, use_cache=False).logits),
        "ropewalk": contender(plain, plain),
    }


def writers(config: BenchmarkConfig, experiment: Experiment) -> dict[str, Contender]:
    """Greedy texts from a prompt of 8 tokens, by the same weights."""
    model = Transformer(replace(experiment.model, position="rope"), config.vocab_size).eval()
    llama = llama_of(model, experiment.data.context).eval()
    prompt, new = list(range(1, 9)), config.new_tokens
    parameters = sum(p.numel() for p in model.parameters())

    def ours(batch: int, forward: Callable | None = None) -> Contender:
        turn = lambda: list(generate(model, [prompt] * batch, new, temperature=0.0, forward=forward))  # noqa: E731
        return Contender(turn, batch * new, parameters)

    def transformers_text() -> None:
        settings = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        llama.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 8, dtype=torch.long), **settings)

    @torch.no_grad()
    def without_cache() -> None:
        ids = torch.tensor([prompt])
        for _ in range(new):
            ids = torch.cat((ids, model.last_logits(ids).argmax(-1, keepdim=True)), dim=1)

    made = {"transformers generate": Contender(transformers_text, new, parameters), "ropewalk": ours(1)}
    if config.compile:
        made["ropewalk compiled"] = ours(1, compiled_or_plain(model.last_logits))
    return made | {"ropewalk, 16 rows": ours(16), "ropewalk, no cache": Contender(without_cache, new, parameters)}


def benchmark(config: BenchmarkConfig) -> str:
    """Let the contenders take turns; returns the table."""
    keep_freed_memory()
    experiment = parse_experiment(["--config", config.shape])
    timed = (writers if config.what == "generate" else trainers)(config, experiment)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for contender in timed.values():
        contender.turn()  # the first turn allocates, and compiles
    for number in range(config.rounds):
        # Every contender goes first, second, ... equally often.
        names = list(timed)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            timed[name].turn()
            seconds[name].append(time.perf_counter() - start)

    first = next(iter(timed))
    work = f"text of {config.new_tokens} tokens" if config.what == "generate" else "training step"
    lines = [
        f"{work}, {config.shape}, fp32, {torch.get_num_threads()} threads, medians of {config.rounds} turns",
        f"{'':<22}{'parameters':>12}{'tokens/turn':>13}{'ms/turn':>10}{'tokens/s':>10}   tokens/s of {first} = 1 (middle half)",
    ]
    for name, times in seconds.items():
        median, tokens = statistics.median(times), timed[name].tokens
        pairs = zip(times, seconds[first], strict=True)
        ratios = sorted(tokens / timed[first].tokens * base / own for own, base in pairs)
        quarter = len(ratios) // 4
        lines.append(
            f"{name:<22}{timed[name].parameters:>12,}{tokens:>13,}{1000 * median:>10.1f}{tokens / median:>10,.0f}"
            f"   {statistics.median(ratios):.3f} ({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or (arguments[0].startswith("--") and "--help" not in arguments):
        arguments = ["train", *arguments]
    config = parse(BenchmarkConfig, arguments, prog="benchmark.py", description="Time it.", positional=["what"])
    run_guarded("benchmark.py", lambda: print(benchmark(config)), "--debug" in arguments)


if __name__ == "__main__":
    main()
