"""How fast a training step is: `python scripts/benchmark.py`, beside the same model in transformers, or with
`--against encodings` under every position encoding.

All contenders run the same fp32 loop (forward, loss, backward, clipping, fused AdamW) on the same batch in one
process, taking turns, so that a busy machine slows all of them. The figures to read are the ratios.
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
from model.positions import ENCODINGS
from model.scoring import token_losses
from model.transformer import Transformer
from train import make_optimizer


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to time."""

    against: Literal["transformers", "encodings"] = "transformers"
    """Compare our RoPE model with transformers' Llama, or the encodings with each other."""
    shape: str = "small.yaml"
    """Config file whose model, context and batch size are timed."""
    batch_size: int | None = None
    """Sequences a step; null takes the config's."""
    rounds: int = 15
    """How often the contenders take turns; the medians over rounds are reported."""
    steps: int = 10
    """Training steps a turn."""
    vocab_size: int = 2048
    """Token ids of all models."""

    def __post_init__(self) -> None:
        if min(self.rounds, self.steps) < 1:
            raise ValueError(f"rounds is {self.rounds} and steps is {self.steps}: give 1 or more")


def llama_like(experiment: Experiment, vocab_size: int) -> torch.nn.Module:
    """transformers' Llama of the same shape. ValueError if transformers is not installed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ValueError("the comparison needs transformers: pip install -r requirements-dev.txt") from None
    model = experiment.model
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.ffn_dim,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.kv_heads,
        tie_word_embeddings=model.tie_embeddings,
        rms_norm_eps=1e-5,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def contenders(config: BenchmarkConfig, experiment: Experiment) -> dict[str, tuple[torch.nn.Module, Callable]]:
    """Models to time and how to get logits from them; the first is what the others are compared with."""

    def ours(position: str) -> tuple[torch.nn.Module, Callable]:
        model = Transformer(replace(experiment.model, position=position), config.vocab_size)
        return model, model

    if config.against == "encodings":
        return {position: ours(position) for position in ENCODINGS}
    llama = llama_like(experiment, config.vocab_size)
    return {"transformers Llama": (llama, lambda x: llama(input_ids=x).logits), "ropewalk": ours("rope")}


def benchmark(config: BenchmarkConfig) -> str:
    """Time training steps by turns; returns the table."""
    experiment = parse_experiment(["--config", config.shape])
    batch, context = config.batch_size or experiment.train.batch_size, experiment.data.context
    timed = contenders(config, experiment)
    optimizers = {name: make_optimizer(model, experiment.train) for name, (model, _) in timed.items()}
    ids = torch.randint(config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def turn(name: str) -> float:
        model, forward = timed[name]
        parameters = list(model.parameters())
        start = time.perf_counter()
        for _ in range(config.steps):
            optimizers[name].zero_grad(set_to_none=True)
            loss = token_losses(forward(x), y).sum() / y.numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, experiment.train.grad_clip)
            optimizers[name].step()
        return (time.perf_counter() - start) / config.steps

    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for name in timed:
        turn(name)  # the first steps allocate
    for number in range(config.rounds):
        # Every contender goes first, second, ... equally often.
        names = list(timed)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(turn(name))

    first = next(iter(timed))
    lines = [
        f"training step, {config.shape}, fp32, {batch} x {context} tokens, {torch.get_num_threads()} threads, "
        f"medians of {config.rounds} turns of {config.steps} steps",
        f"{'':<20}{'parameters':>12}{'ms/step':>10}{'tokens/s':>12}   step time / {first} (middle half of turns)",
    ]
    for name, times in seconds.items():
        median = statistics.median(times)
        ratios = sorted(a / b for a, b in zip(times, seconds[first], strict=True))
        quarter = len(ratios) // 4
        parameters = sum(p.numel() for p in timed[name][0].parameters())
        lines.append(
            f"{name:<20}{parameters:>12,}{1000 * median:>10.1f}{batch * context / median:>12,.0f}"
            f"   {statistics.median(ratios):.3f} ({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    config = parse(BenchmarkConfig, arguments, prog="benchmark.py", description="Time a training step.")
    run_guarded("benchmark.py", lambda: print(benchmark(config)), "--debug" in arguments)


if __name__ == "__main__":
    main()
