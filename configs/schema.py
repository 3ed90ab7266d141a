"""The settings of a run: what they are, how they are read, and what is refused.

Order: defaults < YAML file < command line. Every mistake is one line on stderr and exit code 2.
"""

import dataclasses
import difflib
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import docstring_parser
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader, set_loader, set_parsing_settings

from configs.tracking import TrackingConfig
from data.config import DataConfig
from model.config import SCALING_KINDS, ModelConfig, ScalingConfig

SHIPPED = Path(__file__).parent
T = TypeVar("T")


class SettingsError(ValueError):
    """Something asked for that cannot be; the message is one line that says what to change."""


@dataclass(frozen=True)
class TrainConfig:
    """How weights change."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 32
    """Sequences a step, over all micro-batches and processes."""
    micro_batch_size: int | None = None
    """Sequences in one forward and backward pass; less than batch_size accumulates gradients; null is all."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks, AdamW for the rest, at one learning rate; needs a GPU."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warm-up: cosine to the end, or wsd: stable, then linear decay over the last decay_fraction."""
    decay_fraction: float = 0.3
    """wsd: share of all steps in which the learning rate decays."""
    min_lr_ratio: float = 0.0
    """The learning rate falls towards this share of its peak, and never to 0."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    beta1: float = 0.9
    """AdamW: decay of the mean of gradients; Muon keeps its own 0.95."""
    beta2: float = 0.95
    """AdamW: decay of the mean of squared gradients."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; longer ones are scaled down to it."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 is autocast; auto takes it on a GPU that is fast at it and fp32 elsewhere, always on a CPU."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile the model; auto compiles on a GPU, unless the run has fewer than 1,000 steps or is sharded."""
    activation_checkpointing: bool = False
    """Keep only what goes into each block and make the rest again for backward: far less memory, about a third slower."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Several processes (torchrun): ddp copies the model to each, fsdp spreads it over all; auto is ddp."""
    log_every: int = 10
    """Steps between lines of metrics; a logged loss is the mean over them."""
    save_every: int = 500
    """Steps between checkpoints; the last step is always saved."""
    sharded_checkpoints: bool = False
    """With fsdp: every process writes its own part while training goes on, and none gathers the whole model."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay, at least 2; the best one stays besides."""

    def __post_init__(self) -> None:
        _at_least(self, "train", 1, "steps", "batch_size", "log_every", "save_every")
        _at_least(self, "train", 0, "warmup_steps", "weight_decay")
        _at_least(self, "train", 2, "keep_checkpoints")
        if self.warmup_steps > self.steps:
            raise SettingsError(f"train.warmup_steps {self.warmup_steps} is beyond train.steps {self.steps}: lower it")
        if self.sharded_checkpoints and self.parallel != "fsdp":
            raise SettingsError(f"train.sharded_checkpoints needs train.parallel fsdp, and that is {self.parallel}")
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise SettingsError("train.optimizer muon needs whole matrices, which train.parallel fsdp cuts: use ddp")
        if self.micro_batch_size is not None and (self.micro_batch_size < 1 or self.batch_size % self.micro_batch_size):
            raise SettingsError(
                f"train.batch_size {self.batch_size} is not a multiple of train.micro_batch_size {self.micro_batch_size}"
            )
        for name in ("learning_rate", "grad_clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise SettingsError(f"train.{name} is {getattr(self, name)}: give a finite value above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingsError(f"train.{name} is {getattr(self, name)}: give a value in [0, 1)")
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingsError(f"train.{name} is {getattr(self, name)}: give a value in [0, 1]")


@dataclass(frozen=True)
class EvalConfig:
    """What is measured on held-out text; nothing here changes the training run."""

    every: int = 250
    """Steps between validations; one is always made at the end."""
    windows: int = 512
    """Fixed validation windows of data.context tokens each, spread over the held-out text."""
    batch_tokens: int = 8192
    """Tokens scored in one forward pass."""
    length_ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)
    """Contexts of the length curve, as multiples of data.context."""
    length_block: int = 32
    """Consecutive targets that end each window of the length curve, the same for every context."""
    length_targets: int = 4096
    """Targets of the length curve, in all."""
    sample_prompt: str = "The"
    """Text that samples during training go on from."""
    sample_tokens: int = 64
    """New tokens of each sample; 0 makes none."""

    def __post_init__(self) -> None:
        _at_least(self, "eval", 1, "every", "windows", "batch_tokens", "length_block", "length_targets")
        _at_least(self, "eval", 0, "sample_tokens")
        if not self.length_ratios or min(self.length_ratios) <= 0:
            raise SettingsError(f"eval.length_ratios is {list(self.length_ratios)}: give values above 0")


@dataclass(frozen=True)
class Experiment:
    """All settings of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    name: str | None = None
    """Folder of the run inside out_dir; null makes it from tracking.group, model.position and seed."""
    seed: int = 0
    """Seeds the initial weights, the order of batches, dropout and samples."""
    out_dir: str = "runs"
    """Where run folders are made."""
    resume: bool = False
    """Go on from the newest checkpoint of the run folder instead of refusing to touch it."""
    init_from: str | None = None
    """Start from the weights of the newest checkpoint of this run folder instead of fresh ones; for fine-tuning."""
    device: str = "auto"
    """cuda, mps, cpu, or a numbered one such as cuda:1; auto takes the first of these that is there."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", self.run_name):
            raise SettingsError(f"name is {self.run_name!r}: use letters, digits, '.', '_' and '-' only")
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise SettingsError(f"device is {self.device!r}: give auto, cpu, mps, cuda or cuda:N")
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"seed is {self.seed}: give a whole number from 0 to 2^63 - 1")
        scaling = self.model.rope.scaling
        _stretches(scaling)
        if SCALING_KINDS[scaling.kind] and scaling.trained_length is None:
            raise SettingsError(
                f"model.rope.scaling.kind {scaling.kind} needs model.rope.scaling.trained_length, the length before stretching"
            )
        if min(self.contexts) < self.eval.length_block:
            raise SettingsError(
                f"eval.length_block {self.eval.length_block} is longer than the shortest context of the length "
                f"curve, {min(self.contexts)} = {min(self.eval.length_ratios)} x data.context {self.data.context}"
            )

    @property
    def run_name(self) -> str:
        """Name of the run and of its folder."""
        seed = f"-s{self.seed}" if self.seed else ""
        return self.name or f"{self.tracking.group}-{self.model.position}{seed}"

    @property
    def run_dir(self) -> Path:
        return Path(self.out_dir).expanduser() / self.run_name

    @property
    def contexts(self) -> list[int]:
        """Contexts of the length curve in tokens, ascending."""
        return sorted({max(1, round(ratio * self.data.context)) for ratio in self.eval.length_ratios})


@dataclass(frozen=True)
class RopeOverride:
    """What may be changed of a trained model's RoPE; kind none leaves it as it was trained."""

    scaling: ScalingConfig = field(default_factory=ScalingConfig)

    def __post_init__(self) -> None:
        _stretches(self.scaling)


@dataclass(frozen=True)
class ModelOverride:
    """What may be changed of a trained model."""

    rope: RopeOverride = field(default_factory=RopeOverride)
    window: int | None = None
    """Tokens that attention may reach back, itself included; null leaves that as it was trained."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.window is {self.window}: give 1 or more")


def _stretches(scaling: ScalingConfig) -> None:
    """SettingsError for a stretching by nothing; dynamic grows with the text, whatever its factor."""
    if scaling.kind not in ("none", "dynamic") and scaling.factor == 1:
        raise SettingsError(
            f"model.rope.scaling.kind {scaling.kind} stretches nothing with model.rope.scaling.factor 1: give a higher one"
        )


def _at_least(section: object, prefix: str, smallest: int, *names: str) -> None:
    for name in names:
        if getattr(section, name) < smallest:
            raise SettingsError(f"{prefix}.{name} is {getattr(section, name)}: give {smallest} or more")


class _StrictLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise SettingsError(f"key {key.value!r} stands twice, in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class _StrictDumper(yaml.SafeDumper):
    """Puts quotes around a text that _StrictLoader would take for a number."""


# PyYAML follows YAML 1.1, where a float needs a dot and a signed exponent.
for _side in (_StrictLoader, _StrictDumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


_load_yaml = get_loader("yaml")


def _load_value(text: str) -> Any:
    """A value as YAML, but only `null` is nothing: `# text` and `~` are text."""
    value = _load_yaml(text)
    return text if value is None and text.strip() != "null" else value


set_loader("yaml", _load_value, (yaml.YAMLError,))


def read_yaml(path: str) -> dict[str, Any]:
    """Read a settings file, looked up as a path and then among the shipped ones, on top of its `base`.

    A file that names no tracking.group gets the stem of the file at the root of its bases, so that
    variants of one recipe share a group. SettingsError when missing, unreadable or malformed.
    """
    return _read_yaml(path, Path.cwd(), ())


def _read_yaml(name: str, beside: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    candidates = [beside / Path(name).expanduser(), SHIPPED / name]
    path = next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
    if path is None:
        shipped = ", ".join(sorted(p.name for p in SHIPPED.glob("*.yaml")))
        raise SettingsError(f"config file {name} does not exist; shipped are {shipped}")
    if path in seen:
        raise SettingsError(f"config file {name} has itself as base")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)  # noqa: S506, a SafeLoader
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML: {_one_line(error)}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path} is not made of `key: value` lines")
    base = values.pop("base", None)
    if base is None:
        tracking = values.setdefault("tracking", {})
        if isinstance(tracking, dict):
            tracking.setdefault("group", path.stem)
        return values
    return _merged(_read_yaml(str(base), path.parent, (*seen, path)), values)


def _merged(under: dict, over: dict) -> dict:
    """`over` on top of `under`, section by section."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def to_yaml(settings: object) -> str:
    """All settings of a dataclass as YAML that reads back to the same settings."""
    plain = dataclasses.asdict(settings)
    return yaml.dump(_tuples_to_lists(plain), Dumper=_StrictDumper, sort_keys=False)


def _tuples_to_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples_to_lists(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def parse_experiment(arguments: Sequence[str]) -> Experiment:
    """Settings of `train.py` from the command line; a mistake ends the program with exit code 2."""
    return parse(Experiment, arguments, prog="train.py", description="Train one model.", config_file=True)


def parse(
    settings: type[T],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    config_file: bool = False,
    positional: Sequence[str] = (),
) -> T:
    """Read a frozen dataclass from the command line: one parser and one manner for every program.

    Args:
        settings: the dataclass; its attribute docstrings are the help.
        arguments: the command line without the program's name.
        config_file: offer --config FILE and --print_config.
        positional: fields given by place instead of by flag.

    A mistake ends the program with one line on stderr and exit code 2.
    """
    try:
        return _parse(settings, list(arguments), prog, description, config_file, positional)
    except (ValueError, ArgumentError) as error:
        fail(prog, _one_line(error))


def _parse(
    settings: type[T], arguments: list[str], prog: str, description: str, config_file: bool, positional: Sequence[str]
) -> T:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False)
    help_of = {field.arg_name: field.description for field in docstring_parser.parse_from_object(settings).params}
    for name in positional:
        parser.add_argument(name, help=help_of[name])
    # --config is only listed here: the file is read by our stricter loader and becomes the defaults.
    if config_file:
        parser.add_argument("--config", help="YAML file of settings; a path, or the name of a shipped file")
        parser.add_argument("--print_config", action="store_true", help="print the resolved settings and stop")
    parser.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    parser.add_class_arguments(settings, as_group=False, skip=set(positional))

    kinds = _keys(settings)
    known = set(kinds)
    # A switch may stand alone: --resume is --resume true.
    alone = {f"--{key}" for key, kind in kinds.items() if kind is bool}
    arguments = [
        f"{argument}=true" if argument in alone and after.startswith("--") else argument
        for argument, after in itertools.zip_longest(arguments, arguments[1:], fillvalue="--")
    ]
    # jsonargparse has a --print_config of its own, tied to its own reader of files.
    print_config = config_file and "--print_config" in arguments
    arguments = [argument for argument in arguments if argument != "--print_config"]
    if config_file and (files := _option(arguments, "--config")):
        values: dict[str, Any] = {}
        for name in files:
            values = _merged(values, read_yaml(name))
        sections = {key.rpartition(".")[0] for key in known} - {""}
        for key in _flat(values):
            if key not in known:
                raise SettingsError(f"unknown key {key} in {' or '.join(files)}{_nearest(key, known)}")
            if key in sections:
                raise SettingsError(f"{key} in {' or '.join(files)} is a section: give it `key: value` lines")
        parser.parse_object(values)
        parser.set_defaults(values)
    for argument in arguments:
        key = argument[2:].partition("=")[0]
        own = {"config", "print_config", "debug", "help"}
        if argument.startswith("--") and key and key not in known | own:
            raise SettingsError(f"unknown flag --{key}{_nearest(key, known | own, '--')}")
    parsed = parser.parse_args(arguments)
    result = parser.instantiate(parsed)
    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(settings)}
    experiment = settings(**{k: _plain(v) for k, v in fields.items()})
    if print_config:
        print(to_yaml(experiment), end="")
        sys.exit(0)
    return experiment


def gather_lists(arguments: Sequence[str], flags: set[str]) -> list[str]:
    """Turn `--seeds 0 1 2` into `--seeds=[0,1,2]` for the given flags, as people write lists on a command line."""
    gathered: list[str] = []
    values: list[str] | None = None
    for argument in [*arguments, "--"]:
        if argument.startswith("--"):
            if values is not None:
                name = gathered.pop()
                # One value that is a list already, such as [0,1], stays one.
                listed = (
                    values[0]
                    if len(values) == 1 and values[0].startswith("[")
                    else f"[{','.join(map(json.dumps, values))}]"
                )
                gathered.append(f"{name}={listed}")
            values = [] if argument[2:] in flags else None
            gathered.append(argument)
        elif values is not None:
            values.append(argument)
        else:
            gathered.append(argument)
    return gathered[:-1]


def _plain(value: Any) -> Any:
    return value.as_dict() if isinstance(value, Namespace) else value


def _option(arguments: list[str], flag: str) -> list[str]:
    """All values of a flag given as `--flag value` or `--flag=value`."""
    values = [a.partition("=")[2] for a in arguments if a.startswith(flag + "=")]
    return values + [b for a, b in itertools.pairwise(arguments) if a == flag]


def _keys(settings: type, prefix: str = "") -> dict[str, Any]:
    """Dotted names of all settings and sections of a dataclass, with their types."""
    keys: dict[str, Any] = {}
    for f in dataclasses.fields(settings):
        keys[prefix + f.name] = f.type
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            keys |= _keys(f.type, f"{prefix}{f.name}.")
    return keys


def _flat(values: dict, prefix: str = "") -> list[str]:
    """Dotted names of all values in nested settings."""
    keys = []
    for key, value in values.items():
        keys += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return keys


def _nearest(key: str, known: set[str], dashes: str = "") -> str:
    """A hint at the key that was probably meant: the most alike, or one of that name in another section."""
    name = key.rpartition(".")[2].replace("-", "_")
    same_name = [k for k in sorted(known) if k.rpartition(".")[2] == name]
    near = same_name or difflib.get_close_matches(key.replace("-", "_"), sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {dashes}{near[0]}?" if near else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def interactive() -> bool:
    """Progress bars make sense: stderr is a terminal that can draw a line anew."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def run_guarded(prog: str, action: Callable[[], None], debug: bool) -> None:
    """Run a program: what fails is one line on stderr, and exit code 2 for wrong settings or data, 1 for the rest.

    With `debug` the traceback comes first.
    """
    try:
        action()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            traceback.print_exc()
        expected = isinstance(error, ValueError | FileNotFoundError)
        fail(
            prog, _one_line(error) if expected else f"{type(error).__name__}: {_one_line(error)}", 2 if expected else 1
        )


def fail(prog: str, message: str, code: int = 2) -> NoReturn:
    """End the program with one line on stderr."""
    print(f"{prog}: error: {message}", file=sys.stderr)
    sys.exit(code)
