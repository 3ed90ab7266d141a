"""One contender of scripts/benchmark.py, alone in its process, as a user would run it: what is set up for one library,
such as how memory is kept, cannot help another.

It gets ready, warms up with one turn, and prints a line of JSON with its facts; then for every line that comes in it
takes one turn and prints its seconds. In between it waits for input and computes nothing.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F

from configs.schema import Experiment, parse, run_guarded
from data.batches import cut
from data.corpus import open_corpus
from data.prepare import Tokens, prepare
from data.tokenizer import load_tokenizer
from model.device import choose_autocast, choose_device, compiled_or_plain, keep_freed_memory
from model.generation import generate
from model.hub import llama_config, to_llama
from model.loss import token_losses
from model.parallel import Team
from model.transformer import Transformer
from train import make_optimizers, train_step

# What is timed, and how many tokens (of prepare and encode bytes, of matmul FLOPs) it does.
Turn = tuple[Callable[[], object], int]
PROMPT = list(range(1, 9))


@dataclass(frozen=True)
class ContenderConfig(Experiment):
    """What to do in a turn; all settings of a run are settings here too, and data.vocab_size is the vocabulary."""

    task: Literal["train", "decode", "prepare", "encode", "matmul"] = "train"
    """Training steps on random ids; greedy text; making a cache entry in a new folder of data.cache_dir; what the
    tokenizer alone takes for it; or products of two square matrices."""
    library: Literal["ropewalk", "transformers"] = "ropewalk"
    """Whose model."""
    turn_steps: int = 10
    """Training steps, or products, of a turn."""
    new_tokens: int = 512
    """Tokens of a text."""
    rows: int = 1
    """Texts at a time."""
    cached: bool = True
    """Keep keys and values; without, every token is made from all before it."""
    side: int = 2048
    """Rows and columns of the matrices."""


def llama_of(model: Transformer, context: int) -> torch.nn.Module:
    """The same model in transformers, which wants embeddings at plain Llama's scale. ValueError if it is missing."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ValueError("the comparison needs transformers: pip install -r requirements-dev.txt") from None
    llama = LlamaForCausalLM(LlamaConfig(**llama_config(model.config, model.vocab_size, context)))
    llama.load_state_dict(to_llama(model), strict=False)
    llama.tie_weights()
    return llama


def matmul(config: ContenderConfig, device: torch.device) -> Turn:
    """The machine's own speed: fp32 on a CPU, bf16 elsewhere."""
    side, dtype = config.side, torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    return lambda: [torch.mm(a, b) for _ in range(config.turn_steps)], config.turn_steps * 2 * side**3


def reader(config: ContenderConfig) -> Turn:
    """From documents to ids."""
    texts = [document.text for document in open_corpus(config.data)]
    work = sum(len(text.encode()) for text in texts)
    if config.task == "encode":
        tokenizer = load_tokenizer(config.data.tokenizer)
        # Some megabytes at a time: of all of it at once, the results would take tens of times its memory.
        batches = [texts[first : first + 100] for first in range(0, len(texts), 100)]
        return lambda: [len(tokenizer.encode_batch_fast(batch, add_special_tokens=False)) for batch in batches], work
    folders = (f"{config.data.cache_dir}/{os.getpid()}-{number}" for number in itertools.count())
    return lambda: prepare(replace(config.data, cache_dir=next(folders)), lambda _: None), work


def bf16_difference(model: Transformer, config: ContenderConfig, device: torch.device) -> float:
    """Loss under bf16 autocast minus that in fp32, in nats per token of the same random ids."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (4, config.data.context + 1), generator=random).to(device)
    losses = []
    for bf16 in (True, False):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            losses.append(token_losses(model(ids[:, :-1]), ids[:, 1:]).double().mean().item())
    return losses[0] - losses[1]


def trainer(config: ContenderConfig, model: Transformer, device: torch.device) -> Turn:
    """Forward, loss, backward, clipping, fused AdamW: train.py's own step, or the same for transformers."""
    train, context, compiled = config.train, config.data.context, config.train.compile is True
    autocast = choose_autocast(train.precision, device)
    random = np.random.default_rng(0)
    tokens = Tokens([random.integers(config.data.vocab_size, size=train.batch_size * context + 1)])
    windows, work = np.arange(train.batch_size), config.turn_steps * train.batch_size * context
    if config.library == "ropewalk":
        forward, optimizers = compiled_or_plain(model) if compiled else model, make_optimizers(model, train)
        micro, team = train.micro_batch_size or train.batch_size, Team(device)

        def step() -> None:
            train_step(forward, optimizers, tokens, windows, context, micro, train.grad_clip, autocast, team)
    else:
        llama = llama_of(model, context).to(device)
        forward, (optimizer,) = torch.compile(llama) if compiled else llama, make_optimizers(llama, train)

        def step() -> None:
            x, y = (torch.from_numpy(ids).to(device) for ids in cut(tokens, windows * context, context))
            optimizer.zero_grad(set_to_none=True)
            with autocast:
                logits = forward(input_ids=x, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(llama.parameters(), train.grad_clip)
            optimizer.step()
            loss.item()

    return lambda: [step() for _ in range(config.turn_steps)], work


def writer(config: ContenderConfig, model: Transformer, device: torch.device) -> Turn:
    """Greedy text from a prompt of 8 tokens."""
    new, compiled = config.new_tokens, config.train.compile is True
    prompts = [PROMPT] * config.rows
    if config.library == "transformers":
        llama = llama_of(model.eval(), config.data.context).to(device).eval()
        ids = torch.tensor(prompts, device=device)
        settings: dict[str, Any] = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        if compiled:
            # As its manual has it: a cache of fixed size, so that one compiled step serves every length.
            llama.forward = torch.compile(llama.forward)
            settings |= {"cache_implementation": "static", "disable_compile": True}
        mask = torch.ones_like(ids)
        return lambda: llama.generate(ids, attention_mask=mask, **settings), config.rows * new
    if config.cached:
        forward = compiled_or_plain(model.last_logits) if compiled else None
        return lambda: list(generate(model, prompts, new, temperature=0.0, forward=forward)), config.rows * new

    @torch.no_grad()
    def from_the_start() -> None:
        ids = torch.tensor(prompts, device=device)
        for _ in range(new):
            ids = torch.cat((ids, model.last_logits(ids).argmax(-1, keepdim=True)), dim=1)

    return from_the_start, config.rows * new


def compete(config: ContenderConfig) -> None:
    # What others print must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    device = choose_device(config.device)
    facts: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    if config.task == "matmul":
        turn, work = matmul(config, device)
    elif config.task in ("prepare", "encode"):
        turn, work = reader(config)
    else:
        if config.library == "ropewalk":
            keep_freed_memory()  # as train.py and generate.py do
        model = Transformer(config.model, config.data.vocab_size, config.seed).to(device)
        facts["parameters"] = sum(p.numel() for p in model.parameters())
        if device.type == "cuda":
            facts["bf16_minus_fp32"] = bf16_difference(model, config, device)
        turn, work = (trainer if config.task == "train" else writer)(config, model, device)
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)

    def timed() -> float:
        start = time.perf_counter()
        turn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed()  # the first turn allocates, and compiles
    print(json.dumps({**facts, "work": work, "pid": os.getpid()}), file=answers, flush=True)
    for _ in sys.stdin:
        print(timed(), file=answers, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 when the input ends, 2 wrong settings, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    config = parse(ContenderConfig, arguments, prog="contender.py", description="Be timed.", config_file=True)
    run_guarded("contender.py", lambda: compete(config), "--debug" in arguments)


if __name__ == "__main__":
    main()
