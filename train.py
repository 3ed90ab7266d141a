"""Train one model: `python train.py --config small.yaml`.

`run` does it in order: device, run folder, data; then a `Training` with model, optimizer and what is resumed, which
goes step after step with validation and checkpoints; and the length curve at the end.
"""

import signal
import sys

if __name__ == "__main__":
    # Until StopRequest takes over: Ctrl-C while torch is being imported ends quietly, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Help, and mistakes in the settings, need not wait for torch.
    from configs.schema import parse_experiment

    parse_experiment(sys.argv[1:])

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from configs.record import Record
from configs.run_folder import flatten, read_run_json, refuse_other_run
from configs.schema import Experiment, SettingsError, TrainConfig, interactive, parse_experiment, run_guarded
from data import batches
from data.prepare import PreparedData, Tokens, prepare
from data.tokenizer import TextStream, byte_lengths, end_of_text_id
from model import checkpoint
from model.device import (
    choose_autocast,
    choose_device,
    compiled_or_plain,
    keep_freed_memory,
    name_device,
    random_state,
    set_random_state,
)
from model.generation import generate
from model.parallel import Team, is_spread, whole_tensors
from model.scoring import Read, measure
from model.transformer import Transformer

# Compiling takes about a minute: on a GPU a run of fewer steps is rarely long enough to win it back.
COMPILED_STEPS = 1000


class NonFiniteError(RuntimeError):
    """The loss or a gradient stopped being a number."""


class StoppedError(RuntimeError):
    """Training failed at a step; says how to go on."""


class StopRequest:
    """SIGINT and SIGTERM: noted while `graceful`, so that the step can end and be saved; at once otherwise."""

    def __init__(self) -> None:
        self.graceful = False
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if not self.graceful or self.signal is not None:
            sys.exit(128 + number)
        self.signal = number


@dataclass
class Progress:
    """Where training stands; with the weights, the optimizer and the random state, all there is to resume."""

    step: int = 0
    tokens: int = 0
    # Losses since the last line of metrics, so that a resumed run logs the same means.
    pending: list[float] = field(default_factory=list)
    val_loss: float | None = None


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of the update from `step` to `step + 1`: a pure function, above 0 at every step.

    Linear warm-up, then a cosine (Loshchilov and Hutter 2017) or warm-up, stable, decay (Hu et al. 2024,
    MiniCPM); both would reach min_lr_ratio one step after the last.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = config.steps - config.warmup_steps
    if config.schedule == "wsd":
        decay_steps = min(decay_steps, round(config.decay_fraction * config.steps))
    done = max(0, step + 1 - (config.steps - decay_steps)) / (decay_steps + 1)
    falling = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * falling)


def make_optimizers(model: torch.nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW, which decays matrices only: norm gains have one dimension and no reason to shrink.

    With muon the matrices of the blocks have Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) instead,
    its updates scaled to AdamW's RMS, so that one learning rate and one decay fit both (Liu et al. 2025, Moonlight).
    Queries, keys and values are one matrix here and are made orthogonal together.
    """
    parameters, made = list(model.parameters()), []
    if config.optimizer == "muon":
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        parameters = [p for p in parameters if all(p is not matrix for matrix in matrices)]
        settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        made.append(torch.optim.Muon(matrices, **settings, adjust_lr_fn="match_rms_adamw"))
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = config.beta1, config.beta2
    return [torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True), *made]


def train_step(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    tokens: Tokens,
    windows: np.ndarray,
    context: int,
    micro_batch_size: int,
    grad_clip: float,
    autocast: AbstractContextManager,
    team: Team,
) -> tuple[float, float]:
    """One update on `windows`; returns the mean loss in nats per token and the gradient norm before clipping.

    The loss is a sum over all targets of the step divided by their number, so micro-batches of any size
    and any number of processes give the same update. NonFiniteError, with weights and optimizer untouched, when it is not a number.
    """
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    device, own = team.device, team.share(windows)
    for parameter in parameters:
        parameter.grad = None
    loss = torch.zeros((), device=device)
    for first in range(0, len(own), micro_batch_size):
        x, y = reader(tokens)(own[first : first + micro_batch_size] * context, context)
        with team.accumulating(last=first + micro_batch_size >= len(own)):
            with autocast:
                nats = model(x.to(device), targets=y.to(device))
            part = nats / (len(windows) * context)
            # The gradients of all processes will be averaged, and their sum is wanted.
            (part * team.size).backward()
        loss += part.detach()
    loss = team.total(loss)
    own_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    grad_norm = own_norm.full_tensor() if is_spread(own_norm) else own_norm
    # Here alone the device is waited for.
    mean, norm = torch.stack((loss, grad_norm)).tolist()
    if not math.isfinite(mean + norm):
        raise NonFiniteError(f"loss is {mean}, gradient norm is {norm}")
    if norm > grad_clip:  # else all would be multiplied by 1
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, own_norm)
    for optimizer in optimizers:
        optimizer.step()
    return mean, norm


def reader(tokens: Tokens) -> Read:
    """What reads windows of ids, x and y, from their starts and length."""

    def read(starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
        x, y = batches.cut(tokens, starts, length)
        return torch.from_numpy(x), torch.from_numpy(y)

    return read


def block_ends(data: PreparedData, config: Experiment, contexts: list[int]) -> np.ndarray:
    """Ends of the blocks of targets that are scored at every one of `contexts`."""
    starts = data.document_starts("val")
    return batches.block_ends(starts, max(contexts), config.eval.length_block, config.eval.length_targets)


def measure_lengths(
    model: Transformer,
    data: PreparedData,
    config: Experiment,
    autocast: AbstractContextManager,
    team: Team | None = None,
) -> dict:
    """Loss by context on the same held-out targets: every context ends at the same blocks, inside one document.

    Contexts longer than any held-out document are left out, and named under `skipped_contexts`.
    """
    read, starts = reader(data.tokens("val")), data.document_starts("val")
    room = int(np.diff(starts).max()) - 2  # the end-of-text is no target, and the first token has no context
    contexts = [context for context in config.contexts if context <= room]
    block = config.eval.length_block
    token_bytes = torch.from_numpy(byte_lengths(data.tokenizer))
    rows, ends = [], np.empty(0, np.int64)
    if contexts:
        ends = block_ends(data, config, contexts)
    bars, batch_tokens = interactive() and (team is None or team.first), config.eval.batch_tokens
    for context in tqdm(contexts, desc="length curve", unit="context", leave=False, disable=not bars):
        row = measure(model, read, ends - context, context, block, token_bytes, batch_tokens, autocast, team)
        rows.append({"context": context, **row})
    return {
        "trained_context": config.data.context,
        "block": block,
        "targets": len(ends) * block,
        "documents": len(np.unique(np.searchsorted(starts, ends, side="right"))),
        "bytes": rows[0]["bytes"] if rows else 0,
        "skipped_contexts": [context for context in config.contexts if context > room],
        "by_context": [{k: row[k] for k in ("context", "loss", "bits_per_byte", "perplexity")} for row in rows],
    }


def sample(model: Transformer, data: PreparedData, config: Experiment, team: Team) -> str:
    """Text that goes on from eval.sample_prompt, the same for the same weights and seed.

    Of a sharded model, whose weights `measure` has just gathered, every process must take part.
    """
    tokenizer = data.tokenizer
    end_of_text = end_of_text_id(tokenizer)
    ids = tokenizer.encode(config.eval.sample_prompt, add_special_tokens=False).ids or [end_of_text]
    generators = [torch.Generator(model.embedding.weight.device).manual_seed(config.seed)]
    settings = {"generators": generators, "temperature": 0.8, "top_k": 50, "end_of_text": end_of_text}
    settings |= {"forward": team.same_logits(model)} if team.sharded else {}
    stream = TextStream(tokenizer)
    made = generate(model, [ids], config.eval.sample_tokens, **settings)
    return config.eval.sample_prompt + "".join(stream.feed(chosen) for (chosen,) in made) + stream.finish()


def resume_weights(run: Path, model: Transformer, data: PreparedData) -> None:
    """Load the weights of the newest checkpoint of a run, which must have been trained on this data."""
    path = checkpoint.latest(run)
    if checkpoint.read_state(path)["data_fingerprint"] != data.manifest["fingerprint"]:
        raise SettingsError(
            f"{run} was trained on other data than data.source {data.manifest['identity']['corpus']['source']} gives now"
        )
    checkpoint.load_weights(model, path)


def resume_optimizers(
    run: Path, kind: str, model: Transformer, optimizers: list[torch.optim.Optimizer], team: Team
) -> Progress:
    """Load all but the weights of the newest checkpoint of a run: optimizers, random state, and where training stands."""
    path = checkpoint.latest(run)
    state = checkpoint.read_state(path)
    if (before := state.get("optimizer", "adamw")) != kind:
        raise SettingsError(
            f"{run} was trained with train.optimizer {before}, not {kind}: start a new run with --init_from {run}"
        )
    random = checkpoint.restore_optimizers(path, model, optimizers)["random"]
    if team.rank < len(random):
        set_random_state(random[team.rank], team.device)
    else:  # more processes than before
        torch.manual_seed(state["step"] * team.size + team.rank)
    if team.first:
        print(f"resuming {run} from step {state['step']}")
    return Progress(**{name: state[name] for name in ("step", "tokens", "pending", "val_loss")})


def start_from(run: Path, model: Transformer, data: PreparedData) -> None:
    """Load the weights of another run's newest checkpoint. ValueError unless tokenizer and model are the same.

    How RoPE is stretched, how far attention reaches and what is dropped may change.
    """
    path = checkpoint.latest(run)
    state = checkpoint.read_state(path)
    if state["tokenizer_sha256"] != data.manifest["tokenizer_sha256"]:
        raise SettingsError(f"init_from {run} was trained with another tokenizer than this run's data")
    configs = checkpoint.model_config(state["model"]), model.config
    # Heads of keys that are not given are as many as those of queries.
    before, now = (flatten({**asdict(c), "n_kv_heads": c.kv_heads}, "model.") for c in configs)
    free = ("model.rope.scaling.", "model.window", "model.dropout", "model.init_std")
    changed = [
        f"{key} was {before.get(key)!r} and is {value!r}"
        for key, value in now.items()
        if before.get(key) != value and not key.startswith(free)
    ]
    if changed:
        raise SettingsError(f"init_from {run} cannot start a run with other settings: {'; '.join(changed)}")
    checkpoint.load_weights(model, path)


class Training:
    """A run from its first step to its last: the model, what updates it, where it stands, and what is written about it.

    Args:
        config: settings of the run.
        team: the processes that train it together.
        data: what it is trained on.
        autocast: around each forward pass.
        micro_batch_size: sequences of a forward pass.
        resume: go on from the newest checkpoint of the run folder.

    Raises:
        SettingsError: the text is shorter than one window, or a checkpoint does not fit the settings.
    """

    def __init__(
        self,
        config: Experiment,
        team: Team,
        data: PreparedData,
        autocast: AbstractContextManager,
        micro_batch_size: int,
        resume: bool,
    ) -> None:
        self.config, self.team, self.data = config, team, data
        self.autocast, self.micro_batch_size = autocast, micro_batch_size
        self.tokens, self.val_tokens = data.tokens("train"), data.tokens("val")
        context, device, settings = config.data.context, team.device, config.train
        windows = batches.window_count(self.tokens, context)
        self.val_starts = batches.validation_starts(self.val_tokens, context, config.eval.windows)
        for split, number, found in (
            ("training", windows, self.tokens),
            ("validation", len(self.val_starts), self.val_tokens),
        ):
            if number == 0:
                raise SettingsError(
                    f"the {split} text has {len(found)} tokens, and one window of data.context {context} needs "
                    f"{context + 1}: use more text, or a smaller data.context or another data.val_fraction"
                )
        self.order = batches.TrainingOrder(windows, settings.batch_size, config.seed)
        self.token_bytes = torch.from_numpy(byte_lengths(data.tokenizer))

        torch.manual_seed(config.seed)
        self.model = model = Transformer(config.model, data.manifest["vocab_size"], config.seed)
        if team.size == 1 or settings.parallel != "fsdp":  # else each puts its part there
            model.to(device)
        model.activation_checkpointing = settings.activation_checkpointing
        # What dropout draws must not depend on how the weights were made, and differs between processes.
        torch.manual_seed(config.seed + team.rank)
        if config.init_from and not resume:
            start_from(Path(config.init_from), model, data)
        parameters, decayed = (sum(p.numel() for p in model.parameters() if p.dim() >= least) for least in (1, 2))
        self.record = Record(config, parameters) if team.first else None
        team.wait()
        if resume:
            resume_weights(config.run_dir, model, data)
        self.forward = team.spread(model, settings.parallel, bf16=not isinstance(autocast, nullcontext))
        repaid = device.type == "cuda" and settings.steps >= COMPILED_STEPS and not team.sharded
        if settings.compile is True or (settings.compile == "auto" and repaid):
            self.forward = compiled_or_plain(self.forward)
        self.optimizers = make_optimizers(model, settings)
        self.shards = None
        if team.sharded and settings.sharded_checkpoints:
            from model.sharded import ShardedSaves

            self.shards = ShardedSaves(team)
        self.progress = Progress()
        if resume:
            self.progress = resume_optimizers(config.run_dir, settings.optimizer, model, self.optimizers, team)
        if self.record:
            self.record.begin(self.progress.step, data, team.size, name_device(device))
            self.record.print_start(data, team.size, micro_batch_size, windows, decayed)
        bars, first = interactive() and team.first, self.progress.step
        self.bar = tqdm(total=settings.steps, initial=first, unit="step", disable=not bars, dynamic_ncols=True)
        printing = partial(print, flush=True) if team.first else say_nothing
        self.say = partial(tqdm.write, file=sys.stdout) if bars else printing

    def to_the_end(self, stop: StopRequest) -> int:
        """Step after step; returns the number of the signal that ended it early, or 0."""
        settings, progress = self.config.train, self.progress
        self.model.train()
        self.clock, self.clock_tokens = time.perf_counter(), progress.tokens
        signalled = 0
        while progress.step < settings.steps and not signalled:
            rate, grad_norm = self.step()
            last = progress.step == settings.steps
            if progress.step % settings.log_every == 0 or last:
                self.report(rate, grad_norm)
            if progress.step % self.config.eval.every == 0 or last:
                pause = time.perf_counter()
                self.validate()
                self.clock += time.perf_counter() - pause
            if progress.step % settings.save_every == 0 or last:
                self.save()
            signalled = self.team.largest(stop.signal or 0)
        if signalled:
            self.save()
        if self.shards:
            self.shards.wait()
            signalled = signalled or self.team.largest(stop.signal or 0)
        return signalled

    def step(self) -> tuple[float, float]:
        """One update; returns its learning rate and the gradient norm before clipping."""
        settings, progress, context = self.config.train, self.progress, self.config.data.context
        rate = learning_rate(settings, progress.step)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        loss, grad_norm = train_step(
            self.forward,
            self.optimizers,
            self.tokens,
            self.order.at(progress.step),
            context,
            self.micro_batch_size,
            settings.grad_clip,
            self.autocast,
            self.team,
        )
        progress.step += 1
        progress.val_loss = None
        progress.tokens += settings.batch_size * context
        progress.pending.append(loss)
        self.bar.update()
        return rate, grad_norm

    def log(self, values: dict[str, Any]) -> None:
        if self.record:
            self.record.log({"step": self.progress.step, "tokens": self.progress.tokens, **values})

    def report(self, rate: float, grad_norm: float) -> None:
        """A line of metrics: means since the last one."""
        settings, progress = self.config.train, self.progress
        mean = math.fsum(progress.pending) / len(progress.pending)
        speed = (progress.tokens - self.clock_tokens) / (time.perf_counter() - self.clock)
        progress.pending = []
        values = {"loss": mean, "lr": rate, "grad_norm": grad_norm, "tokens_per_second": speed}
        self.log({f"train/{name}": value for name, value in values.items()})
        self.bar.set_postfix_str(f"loss {mean:.3f}, {speed:,.0f} tokens/s")
        if self.bar.disable:
            left = (settings.steps - progress.step) * settings.batch_size * self.config.data.context / speed
            self.say(
                f"step {progress.step}/{settings.steps}: loss {mean:.4f}, lr {rate:.2e}, {speed:,.0f} tokens/s, {left:.0f} s left"
            )
        self.clock, self.clock_tokens = time.perf_counter(), progress.tokens

    def validate(self) -> None:
        """Loss on the validation windows, and a sample of text."""
        config, team, context = self.config, self.team, self.config.data.context
        read, batch_tokens = reader(self.val_tokens), config.eval.batch_tokens
        scored = self.val_starts, context, context, self.token_bytes, batch_tokens
        result = measure(self.model, read, *scored, self.autocast, team)
        # All processes that hold a part of the model must take part, even if one alone writes.
        wanted = config.eval.sample_tokens and (self.record or team.sharded)
        text = sample(self.model, self.data, config, team) if wanted else None
        if not self.record:
            return
        self.progress.val_loss = result["loss"]
        self.log({f"val/{name}": result[name] for name in ("loss", "bits_per_byte", "perplexity")})
        self.say(
            f"step {self.progress.step}: validation {result['loss']:.4f} nats/token, {result['bits_per_byte']:.4f} bits/byte"
        )
        if text is not None:
            self.record.log_sample(self.progress.step, text)

    def save(self) -> None:
        """A checkpoint; with shards it may be done only later, in the background."""
        config, run_dir, manifest = self.config, self.config.run_dir, self.data.manifest
        others = {"random": self.team.collect(random_state(self.team.device))}
        state = {
            **asdict(self.progress),
            "context": config.data.context,
            "optimizer": config.train.optimizer,
            "data_fingerprint": manifest["fingerprint"],
            "tokenizer_sha256": manifest["tokenizer_sha256"],
        }
        if self.record:
            self.record.metrics.sync()
        folder, prune = run_dir / "checkpoints", partial(checkpoint.prune, run_dir, config.train.keep_checkpoints)
        if self.shards:
            self.shards.save(folder, self.model, self.optimizers, others, state, prune)
            return
        moments = [whole_tensors(optimizer.state_dict()) for optimizer in self.optimizers]
        whole = self.team.whole(self.model)
        if self.record:
            checkpoint.save(folder, whole, {"optimizers": moments, **others}, state)
            prune()


def run(config: Experiment, stop: StopRequest) -> None:
    """Train, save, validate, measure: one whole run."""
    keep_freed_memory()
    team = Team(choose_device(config.device))
    autocast = choose_autocast(config.train.precision, team.device)
    if config.train.optimizer == "muon" and team.device.type == "cpu":
        raise SettingsError(
            "train.optimizer is muon, whose products are in bf16, far slower than fp32 on a CPU: use adamw, or a GPU"
        )
    micro_batch_size = share_batch(config.train, team.size)
    if team.restarted():
        config = replace(config, resume=(config.run_dir / "config.yaml").is_file())
    if team.first:
        refuse_other_run(config)
    # A run that died before its first checkpoint is started over.
    resume = team.from_first(config.resume and bool(checkpoint.checkpoints(config.run_dir)))
    if resume and nothing_to_do(config, team):
        return

    # One process of each machine prepares, and the others find it done.
    say = print if team.first else say_nothing
    data = prepare(config.data, say, progress=team.first and interactive()) if team.local_rank == 0 else None
    team.wait()
    data = data or prepare(config.data, say)

    training = Training(config, team, data, autocast, micro_batch_size, resume)
    record, progress = training.record, training.progress
    stop.graceful = True
    with failures_noted(config.run_dir, record, progress):
        signalled = training.to_the_end(stop)
    training.bar.close()
    stop.graceful = False  # all is saved: from here on a signal stops at once
    lengths = None if signalled else measure_lengths(training.model, data, config, autocast, team)
    team.leave()
    if signalled:
        if record:
            record.end("interrupted", 128 + signalled)
            print(f"stopped at step {progress.step}, saved; go on with --resume true", file=sys.stderr)
        sys.exit(128 + signalled)
    if not record:
        return

    record.log_lengths(lengths)
    record.end("finished")
    record.print_end(progress.step, progress.tokens, lengths)


def say_nothing(line: str) -> None:
    """What the processes print that are not the first."""


def share_batch(config: TrainConfig, processes: int) -> int:
    """Sequences in one forward pass of a process. SettingsError if the batch cannot be shared out."""
    share, rest = divmod(config.batch_size, processes)
    micro = min(config.micro_batch_size or share, share)
    if rest or share % micro:
        raise SettingsError(
            f"train.batch_size {config.batch_size} cannot be shared by {processes} processes in forward passes of "
            f"train.micro_batch_size {config.micro_batch_size}: give a multiple of their product"
        )
    return micro


def nothing_to_do(config: Experiment, team: Team) -> bool:
    """Whether the run to be resumed is finished, and say so. SettingsError if it has gone further than it should."""
    run_dir = config.run_dir
    step = checkpoint.read_state(checkpoint.latest(run_dir))["step"]
    if step > config.train.steps:
        raise SettingsError(f"{run_dir} has {step} steps already: give train.steps {config.train.steps} a higher value")
    done = step == config.train.steps and read_run_json(run_dir).get("status") == "finished"
    if done and team.first:
        print(f"{run_dir} is finished at step {step}: nothing to do; --train.steps with a higher value goes on")
    return done


@contextmanager
def failures_noted(run_dir: Path, record: Record | None, progress: Progress) -> Iterator[None]:
    """Turn what goes wrong in a step into one error that names the step, the last checkpoint and how to go on."""
    try:
        yield
    except Exception as error:
        with suppress(OSError):  # on a full disk this may fail as well
            if record:
                record.end("failed", 1)
        place, remedy, flags = f"after step {progress.step}", "mend that", ""
        reason = f"{error}" if isinstance(error, NonFiniteError | OSError) else f"{type(error).__name__}: {error}"
        if isinstance(error, NonFiniteError):
            place = f"step {progress.step + 1}"
            remedy, flags = "lower train.learning_rate", " --train.learning_rate LOWER"
        elif isinstance(error, OSError):
            remedy = f"make room for {run_dir}"
        found = checkpoint.checkpoints(run_dir)
        raise StoppedError(
            f"{place}: {reason}; "
            + (f"the last good checkpoint is {found[-1]}" if found else "no checkpoint was made yet")
            + f"; {remedy}, then go on with python train.py --config {run_dir}/config.yaml --resume true{flags}"
        ) from error


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings or data, 1 other failure, 130/143 stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments
    config = parse_experiment(arguments)
    run_guarded("train.py", lambda: run(config, StopRequest()), "--debug" in arguments)


if __name__ == "__main__":
    main()
