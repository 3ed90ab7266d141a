"""How fast a training step is, beside the same model in transformers: `python scripts/benchmark.py`.

Both run the same fp32 loop (forward, loss, backward, clipping, fused AdamW) on the same batches in one
process, taking turns, so that a busy machine slows both. The figure to read is the ratio.
"""

import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.schema import Experiment, fail, parse, parse_experiment
from model.scoring import token_losses
from model.transformer import Transformer
from train import make_optimizer


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to time."""

    shape: str = "small.yaml"
    """Config file whose model, context and batch size are timed."""
    position: str = "rope"
    """Position encoding of our model; transformers' Llama always has RoPE."""
    batch_size: int | None = None
    """Sequences a step; null takes the config's."""
    rounds: int = 15
    """How often the two take turns; the medians over rounds are reported."""
    steps: int = 5
    """Training steps a turn."""
    vocab_size: int = 2048
    """Token ids of both models."""

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


def benchmark(config: BenchmarkConfig) -> str:
    """Time training steps of both models by turns; returns the table."""
    experiment = parse_experiment(["--config", config.shape, "--model.position", config.position])
    batch, context = config.batch_size or experiment.train.batch_size, experiment.data.context
    ours = Transformer(experiment.model, config.vocab_size)
    theirs = llama_like(experiment, config.vocab_size)
    contenders = {"ropewalk": (ours, ours), "transformers Llama": (theirs, lambda x: theirs(input_ids=x).logits)}
    optimizers = {name: make_optimizer(model, experiment.train) for name, (model, _) in contenders.items()}
    ids = torch.randint(config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def turn(name: str) -> float:
        model, forward = contenders[name]
        parameters = list(model.parameters())
        start = time.perf_counter()
        for _ in range(config.steps):
            optimizers[name].zero_grad(set_to_none=True)
            loss = token_losses(forward(x), y).sum() / y.numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, experiment.train.grad_clip)
            optimizers[name].step()
        return (time.perf_counter() - start) / config.steps

    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in contenders:
        turn(name)  # the first steps allocate
    for number in range(config.rounds):
        order = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in order:
            times[name].append(turn(name))
    ratios = sorted(a / b for a, b in zip(times["ropewalk"], times["transformers Llama"], strict=True))
    lines = [
        f"training step, {config.shape}, {config.position}, fp32, {batch} x {context} tokens, "
        f"{sum(p.numel() for p in ours.parameters()):,} parameters, {torch.get_num_threads()} threads, "
        f"medians of {config.rounds} turns of {config.steps} steps",
        f"{'':<20}{'ms/step':>10}{'tokens/s':>12}",
    ]
    for name, seconds in times.items():
        median = statistics.median(seconds)
        lines.append(f"{name:<20}{1000 * median:>10.1f}{batch * context / median:>12,.0f}")
    quarter = len(ratios) // 4
    lines.append(
        f"step time of ropewalk / transformers Llama: {statistics.median(ratios):.3f} "
        f"(half of the turns between {ratios[quarter]:.3f} and {ratios[-1 - quarter]:.3f})"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Exit code 0 done, 2 wrong settings, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    config = parse(BenchmarkConfig, arguments, prog="benchmark.py", description="Time a training step.")
    try:
        print(benchmark(config))
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        fail(
            "benchmark.py", " ".join(str(error).split()), 2 if isinstance(error, ValueError | FileNotFoundError) else 1
        )


if __name__ == "__main__":
    main()
