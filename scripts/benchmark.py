"""How fast it is, and what a run would cost: `python scripts/benchmark.py COMMAND`.

    train       a training step beside the same model in transformers, and beside the machine's own matrix product
    encodings   a training step under every position encoding
    decode      making text: beside transformers, without a cache, sixteen texts at a time
    prepare     documents to token shards, beside the tokenizer alone
    startup     how long until train.py prints its help, and until its first step
    scaling     cost of a token by context and by parameters, beside its FLOPs
    gpu         one GPU: bf16 beside fp32, speed and utilisation at 15 M and 124 M parameters
    plan        what the run of a config file needs: parameters, FLOPs, memory, time

Every contender is a process of its own (scripts/contender.py). They take turns, one at work while the others wait, so
that a busy machine slows all of them. The figures to read are the ratios: medians over rounds, with the middle half.
"""

import dataclasses
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.schema import Experiment, fail, parse, parse_experiment, read_yaml, run_guarded
from configs.tracking import new_figure, save_figure
from data.config import DataConfig
from data.corpus import open_corpus
from data.prepare import prepare as prepare_data
from model.plan import HARDWARE, Hardware, Plan, plan, size
from model.positions import ENCODINGS

ROOT = Path(__file__).resolve().parent.parent
# Embeddings at plain Llama's scale, so that both libraries have one matrix for embedding and head.
PLAIN = ["--model.position=rope", "--model.embedding_rms=0.02"]
MATMUL = ["--task=matmul", "--turn_steps=1"]
# What scaling times: contexts with the shape's model; widths, with heads of 32 and SwiGLU of three times the width.
CONTEXTS, DIMS = (128, 256, 512, 1024, 2048), (64, 128, 192, 256, 384)


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to time."""

    command: str
    """What is asked; benchmark.py --help lists it."""
    shape: str = "small.yaml"
    """train, encodings, decode, scaling: config file whose model, context and batch size are timed."""
    batch_size: int | None = None
    """train, encodings: sequences a step; null takes the config's."""
    vocab_size: int = 2048
    """train, encodings, decode, scaling: token ids of all models."""
    rounds: int | None = None
    """How often the contenders take turns; medians are reported; null is 15, and 5 for what takes long."""
    steps: int = 10
    """train, encodings, scaling, gpu: training steps a turn."""
    new_tokens: int = 512
    """decode: tokens of a text."""
    compile: bool = False
    """train, decode: time both libraries compiled as well."""
    megabytes: float = 20
    """prepare: how much text, made from the default one."""
    out: str | None = None
    """scaling: folder of its pictures; null draws none."""
    json: str | None = None
    """File to write the table and its figures to."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "vocab_size", "rounds", "steps", "new_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}: give 1 or more")
        if self.megabytes <= 0:
            raise ValueError(f"megabytes is {self.megabytes}: give more than 0")
        read_yaml(self.shape)  # refused here, if it is not there, and not by every contender

    @property
    def turns(self) -> int:
        return self.rounds or (15 if self.command in ("train", "encodings", "decode") else 5)

    def flags(self, *own: str) -> list[str]:
        """Flags of a contender."""
        batch = [f"--train.batch_size={self.batch_size}"] if self.batch_size else []
        shape = [f"--config={self.shape}", f"--data.vocab_size={self.vocab_size}", f"--turn_steps={self.steps}"]
        return [*shape, "--train.micro_batch_size=null", *batch, *own]


@dataclass(frozen=True)
class PlanConfig(Experiment):
    """A run, and what it shall be trained on."""

    devices: int = 1
    """How many."""
    device_kind: Literal["h100", "h200", "a100", "rtx4090", "cpu"] = "h100"
    """Which; a cpu is this machine's, whose fp32 matrix product is timed on the spot."""
    utilisation: float = 0.4
    """Share of the peak FLOP/s that training reaches."""
    json: str | None = None
    """File to write the plan to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.devices < 1:
            raise ValueError(f"devices is {self.devices}: give 1 or more")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation is {self.utilisation}: give a share of the peak, above 0 and up to 1")


@dataclass(frozen=True)
class Timed:
    """What a contender did: its facts and the seconds of its turns."""

    facts: dict[str, Any]
    seconds: list[float]

    @property
    def rate(self) -> float:
        """Tokens, or FLOPs, a second."""
        return self.facts["work"] / statistics.median(self.seconds)


@dataclass(frozen=True)
class Report:
    """A table, and what is read from it."""

    title: str
    rows: list[dict[str, Any]]
    figures: dict[str, Any] = field(default_factory=dict)
    unprinted: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        cells = [list(self.rows[0]), *([_cell(value) for value in row.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        # Names are read from the left and numbers from the right.
        right = [not isinstance(value, str) for value in self.rows[0].values()]
        pads = [str.rjust if number else str.ljust for number in right]
        lines = [
            "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip()
            for row in cells
        ]
        lines += [f"{name}: {_cell(value)}" for name, value in self.figures.items()]
        return "\n".join(line for line in [self.title, *lines] if line)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return value if isinstance(value, str) else f"{value:,.0f}"


class Contender:
    """A running scripts/contender.py."""

    def __init__(self, flags: list[str]) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in end
        command = [sys.executable, str(ROOT / "scripts/contender.py"), *flags]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def answer(self) -> Any:
        """The next line it prints; ValueError, with what it said last, if it has ended instead."""
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines() or [f"exit code {self.process.returncode}"]
            raise ValueError(said[-1].removeprefix("contender.py: error: "))
        return json.loads(line)

    def turn(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def take_turns(flags: dict[str, list[str]], rounds: int) -> dict[str, Timed]:
    """Time contenders, given by name and flags, against each other. ValueError when one fails."""
    timed: dict[str, Timed] = {}
    contenders: dict[str, Contender] = {}
    try:
        for name in flags:
            # One after the other: the threads of several that warm up at once would wait for each other.
            contenders[name] = Contender(flags[name])
            timed[name] = Timed(contenders[name].answer(), [])
        names = list(flags)
        for number in range(rounds):
            # Each goes first, second, ... equally often.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                timed[name].seconds.append(contenders[name].turn())
        return timed
    finally:
        for contender in contenders.values():
            contender.end()


def take_turns_twice(flags: dict[str, list[str]], rounds: int) -> dict[str, Timed]:
    """The same, half of the rounds with contenders that were started in the other order.

    Of four equal ones the first to be started was an eighth slower than the last: it has the memory that others left.
    """
    first = take_turns(flags, (rounds + 1) // 2)
    if rounds > 1:
        for name, again in take_turns(dict(reversed(flags.items())), rounds // 2).items():
            first[name].seconds.extend(again.seconds)
    return first


def ratio(key: str, of: Timed, to: Timed, factor: float = 1.0) -> dict[str, Any]:
    """Work a second of one over that of the other, round by round: the median, and the middle half."""
    scale = factor * of.facts["work"] / to.facts["work"]
    ratios = sorted(scale * base / own for own, base in zip(of.seconds, to.seconds, strict=True))
    quarter = len(ratios) // 4
    return {key: statistics.median(ratios), f"{key}_middle_half": [ratios[quarter], ratios[-1 - quarter]]}


def rows(timed: dict[str, Timed]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "parameters": one.facts.get("parameters", 0),
            "tokens/turn": one.facts["work"],
            "ms/turn": 1000 * statistics.median(one.seconds),
            "tokens/s": one.rate,
        }
        for name, one in timed.items()
        if "matmul" not in name
    ]


def title(what: str, config: BenchmarkConfig, timed: dict[str, Timed]) -> str:
    facts = next(iter(timed.values())).facts
    where = facts.get("gpu") or f"fp32, {facts['threads']} threads"
    return f"{what}, {where}, torch {facts['torch']}, medians of {config.turns} turns"


def flops_per_token(config: BenchmarkConfig, *flags: str) -> int:
    """FLOPs of training one token of a contender's model."""
    experiment = parse_experiment([f"--config={config.shape}", *flags])
    return size(experiment.model, config.vocab_size, experiment.data.context).flops_per_token


def both_libraries(config: BenchmarkConfig, *flags: str) -> dict[str, list[str]]:
    contenders = {"transformers": config.flags(*PLAIN, *flags, "--library=transformers")}
    contenders["ropewalk"] = config.flags(*PLAIN, *flags)
    if config.compile:
        contenders |= {f"{name} compiled": [*own, "--train.compile=true"] for name, own in contenders.items()}
    return contenders


def train(config: BenchmarkConfig) -> Report:
    """train.py's own step beside the same loop around transformers' Llama."""
    timed = take_turns_twice({**both_libraries(config), "matmul": MATMUL}, config.turns)
    figures = ratio("ratio_to_transformers_eager", timed["ropewalk"], timed["transformers"])
    if config.compile:
        compiled = timed["ropewalk compiled"], timed["transformers compiled"]
        figures |= ratio("ratio_to_transformers_compiled", *compiled)
    cost = flops_per_token(config, *PLAIN)
    figures |= ratio("sgemm_fraction", timed["ropewalk"], timed["matmul"], cost)
    figures |= {"flops_per_token": cost, "sgemm_flops": timed["matmul"].rate}
    return Report(title(f"training step, {config.shape}", config, timed), rows(timed), figures)


def encodings(config: BenchmarkConfig) -> Report:
    timed = take_turns_twice({name: config.flags(f"--model.position={name}") for name in ENCODINGS}, config.turns)
    figures: dict[str, Any] = {}
    for name in list(timed)[1:]:
        figures |= ratio(f"{name}_to_rope", timed[name], timed["rope"])
    return Report(title(f"training step, {config.shape}", config, timed), rows(timed), figures)


def decode(config: BenchmarkConfig) -> Report:
    """Greedy text of the same weights."""
    common = ["--task=decode", f"--new_tokens={config.new_tokens}"]
    contenders = both_libraries(config, *common)
    for name, flag in (("ropewalk, 16 rows", "--rows=16"), ("ropewalk, no cache", "--cached=false")):
        contenders[name] = config.flags(*PLAIN, *common, flag)
    timed = take_turns_twice(contenders, config.turns)
    figures = ratio("ratio_to_transformers", timed["ropewalk"], timed["transformers"])
    figures |= ratio("ratio_to_uncached", timed["ropewalk"], timed["ropewalk, no cache"])
    figures |= ratio("batch_16_ratio", timed["ropewalk, 16 rows"], timed["ropewalk"])
    if config.compile:
        compiled = timed["ropewalk compiled"], timed["transformers compiled"]
        figures |= ratio("ratio_to_transformers_compiled", *compiled)
    return Report(title(f"text of {config.new_tokens} tokens, {config.shape}", config, timed), rows(timed), figures)


def write_text(path: Path, size: float) -> None:
    """At least `size` bytes of text as rows of JSON: documents of the default text, their paragraphs shuffled."""
    documents = [document.text for document in open_corpus(DataConfig())]
    rng = random.Random(0)  # noqa: S311, a text and no secret
    with path.open("w", encoding="utf-8") as file:
        while size > 0:
            paragraphs = rng.choice(documents).split("\n")
            rng.shuffle(paragraphs)
            text = "\n".join(paragraphs)
            size -= len(text.encode())
            file.write(json.dumps({"text": text}) + "\n")


def prepare(config: BenchmarkConfig) -> Report:
    """Making a cache entry, with its tokenizer and with one that is ready; and encoding alone, in batches."""
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, "text.jsonl"), 1e6 * config.megabytes)
        text = ["--data.source=files", f"--data.path={folder}/text.jsonl", f"--data.cache_dir={folder}"]
        first = prepare_data(parse_experiment(text).data, lambda _: None)
        ready = f"--data.tokenizer={first.folder / 'tokenizer.json'}"
        flags = {
            "train a tokenizer and encode": ["--task=prepare"],
            "encode with a ready tokenizer": ["--task=prepare", ready],
            "tokenizers' encode_batch_fast": ["--task=encode", ready],
        }
        timed = take_turns({name: [*text, *own] for name, own in flags.items()}, config.turns)
    whole, encoded, alone = timed.values()
    table = [
        {"name": name, "seconds": statistics.median(one.seconds), "MB/s": one.rate / 1e6} for name, one in timed.items()
    ]
    figures = {"bytes_per_second": whole.rate, **ratio("ratio_to_encode_batch_fast", encoded, alone)}
    return Report(title(f"{alone.facts['work']:,} bytes of text", config, timed), table, figures)


def startup(config: BenchmarkConfig) -> Report:
    """Whole processes, timed from outside."""
    program = [sys.executable, str(ROOT / "train.py")]
    times: dict[str, list[float]] = {"help_seconds": [], "first_step_seconds": []}
    with tempfile.TemporaryDirectory() as folder:
        short = ["--config=tiny.yaml", "--train.steps=1", "--train.warmup_steps=0", "--train.log_every=1"]
        cheap = ["--eval.windows=1", "--eval.sample_tokens=0", "--tracking.mode=disabled", f"--out_dir={folder}"]
        for number in range(config.turns + 1):
            begin = time.perf_counter()
            subprocess.run([*program, "--help"], stdout=subprocess.DEVNULL, check=True)
            middle = time.perf_counter()
            flags = [*short, *cheap, f"--data.cache_dir={folder}/cache", f"--name=run-{number}"]
            process = subprocess.Popen([*program, *flags], stdout=subprocess.PIPE, text=True)
            try:
                if not any(line.startswith("step 1/1:") for line in process.stdout):
                    raise ValueError(f"train.py ended with exit code {process.wait()} before its first step")
                end = time.perf_counter()
            finally:
                process.kill()
                process.communicate()
            if number:  # the first one prepares the data, and reads all programs from the disk
                times["help_seconds"].append(middle - begin)
                times["first_step_seconds"].append(end - middle)
    figures = {name: statistics.median(taken) for name, taken in times.items()}
    table = [
        {"name": name, "seconds": figures[name], "least": min(taken), "most": max(taken)}
        for name, taken in times.items()
    ]
    return Report(f"train.py, tiny.yaml with its data prepared, medians of {config.turns}", table, unprinted=figures)


def scaling(config: BenchmarkConfig) -> Report:
    """Training cost of a token beside the time of its FLOPs at the speed of a matrix product."""
    context = parse_experiment([f"--config={config.shape}"]).data.context
    flags = {f"context {n}": (n, [f"--data.context={n}"]) for n in CONTEXTS}
    for dim in DIMS:
        shape = [f"--model.dim={dim}", f"--model.n_heads={dim // 32}", "--model.n_kv_heads=null"]
        flags[f"dim {dim}"] = context, [*shape, f"--model.ffn_dim={3 * dim}"]
    contenders = {
        name: config.flags(*own, f"--train.batch_size={max(1, 2048 // length)}")
        for name, (length, own) in flags.items()
    }
    timed = take_turns({**contenders, "matmul": MATMUL}, config.turns)
    table = []
    for name, (length, own) in flags.items():
        one, cost = timed[name], flops_per_token(config, *own)
        at_sgemm = 1000 * cost / timed["matmul"].rate
        shape = {"name": name, "context": length, "parameters": one.facts["parameters"], "FLOPs/token": cost}
        speed = {"ms/token": 1000 / one.rate, "ms/token at sgemm": at_sgemm, "fraction": at_sgemm * one.rate / 1000}
        table.append(shape | speed)
    if config.out:
        draw_scaling(table, Path(config.out))
    return Report(title(f"training step of about 2,048 tokens, {config.shape}", config, timed), table)


def draw_scaling(table: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for axis, part in (("context", table[: len(CONTEXTS)]), ("parameters", table[len(CONTEXTS) :])):
        figure, axes, style = new_figure(
            axis, "microseconds per token of training", f"Cost of a training token by {axis}"
        )
        for name, key in (("ropewalk", "ms/token"), ("its FLOPs at the speed of sgemm", "ms/token at sgemm")):
            look = style("rope" if key == "ms/token" else "sinusoidal")
            axes.plot([row[axis] for row in part], [1000 * row[key] for row in part], label=name, **look)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([row[axis] for row in part], [f"{row[axis]:,}" for row in part])
        least, most = axes.get_ylim()
        ticks = [digit * 10**power for power in range(-2, 6) for digit in (1, 2, 3, 5)]
        ticks = [tick for tick in ticks if least <= tick <= most]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        save_figure(figure, axes, folder / f"cost-by-{axis}.png")


def gpu(config: BenchmarkConfig) -> Report:
    """Two sizes, both libraries, compiled and not. ValueError where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("gpu needs a CUDA device, and torch sees none: run it where there is one")
    libraries = ["ropewalk", *(["transformers"] if importlib.util.find_spec("transformers") else [])]
    matmul = ["--device=cuda", *MATMUL, "--side=8192", "--turn_steps=20"]
    table, figures = [], {}
    for label, shape, batch in (("15M", "tinystories.yaml", 64), ("124M", "fineweb-edu-124m.yaml", 16)):
        settings = [f"--config={shape}", f"--train.batch_size={batch}", "--train.micro_batch_size=null", *PLAIN]
        settings += ["--device=cuda", f"--turn_steps={config.steps}"]
        flags = {
            f"{label} {library}{' compiled' if compiled else ''}": [
                *(*settings, f"--library={library}", f"--train.compile={str(compiled).lower()}")
            ]
            for library in libraries
            for compiled in (False, True)
        }
        timed = take_turns({**flags, "matmul": matmul}, config.turns)
        ours = timed[f"{label} ropewalk"]
        figures[f"bf16_minus_fp32_{label}"] = ours.facts["bf16_minus_fp32"]
        chip = ours.facts["gpu"].lower().replace(" ", "")
        peak = next((hardware.flops for kind, hardware in HARDWARE.items() if kind in chip), None)
        experiment = parse_experiment(settings[:2])
        cost = size(experiment.model, experiment.data.vocab_size, experiment.data.context).flops_per_token
        for row in rows(timed):
            flops = row["tokens/s"] * cost
            fractions = {"MFU": flops / peak if peak else "peak unknown", "of matmul": flops / timed["matmul"].rate}
            table.append(row | fractions)
        if len(libraries) == 2:
            for key, form in (("eager", ""), ("compiled", " compiled")):
                pair = (timed[f"{label} {library}{form}"] for library in libraries)
                figures |= ratio(f"ratio_to_transformers_{key}_{label}", *pair)
    return Report(title("training step, bf16 autocast", config, timed), table, figures)


def make_plan(config: PlanConfig) -> Plan:
    """The plan of a run. ValueError if the batch cannot be shared out, or bf16 is refused where only its peak is known."""
    cpu = config.device_kind == "cpu"
    if config.train.precision != "auto" and (config.train.precision == "fp32") != cpu:
        raise ValueError(
            f"train.precision is {config.train.precision}: a {config.device_kind} is planned with auto only"
        )
    if cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        hardware = Hardware(take_turns({"matmul": MATMUL}, 5)["matmul"].rate, memory)
    else:
        hardware = HARDWARE[config.device_kind]
    return plan(
        config.model,
        config.data.vocab_size,
        config.data.context,
        steps=config.train.steps,
        batch_size=config.train.batch_size,
        micro_batch_size=config.train.micro_batch_size,
        checkpointing=config.train.activation_checkpointing,
        bf16=not cpu,
        devices=config.devices,
        hardware=hardware,
        utilisation=config.utilisation,
    )


def show_plan(config: PlanConfig) -> Report:
    planned = make_plan(config)
    what = f"{config.run_name} on {config.devices} x {config.device_kind}"
    table = [{"": name, " ": line} for name, line in planned.lines().items()]
    numbers = {"parameters": planned.size.parameters, "flops_per_token": planned.size.flops_per_token}
    return Report(what, table, unprinted=numbers | {"seconds": planned.seconds, **dataclasses.asdict(planned)})


COMMANDS: dict[str, Callable[[Any], Report]] = {
    "train": train,
    "encodings": encodings,
    "decode": decode,
    "prepare": prepare,
    "startup": startup,
    "scaling": scaling,
    "gpu": gpu,
    "plan": show_plan,
}


def run(command: str, config: BenchmarkConfig | PlanConfig) -> None:
    report = COMMANDS[command](config)
    print(report.text())
    if config.json:
        written = {"command": command, "settings": dataclasses.asdict(config), "title": report.title}
        written |= {"rows": report.rows, **report.figures, **report.unprinted}
        Path(config.json).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or (arguments[0].startswith("--") and "--help" not in arguments):
        arguments = ["train", *arguments]
    command = arguments[0]
    if command == "--help":
        print(__doc__)
    elif command not in COMMANDS and not command.startswith("-"):
        fail("benchmark.py", f"{command} is no command: give one of {', '.join(COMMANDS)}")
    prog = f"benchmark.py {command}"
    if command == "plan":
        config = parse(PlanConfig, arguments[1:], prog=prog, description="Plan a run.", config_file=True)
    else:
        config = parse(BenchmarkConfig, arguments, prog="benchmark.py", description="Time it.", positional=["command"])
    run_guarded(prog, lambda: run(command, config), "--debug" in arguments)


if __name__ == "__main__":
    main()
