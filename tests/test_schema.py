"""Settings: what is understood, and what is refused in one line before any data is read."""

from pathlib import Path

import pytest
import yaml
from conftest import ROOT, run_program

from configs.schema import SHIPPED, Experiment, parse_experiment, read_yaml, to_yaml


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("form", ["1e-3", "1.0e-3", "0.001", "1E-3", "'1e-3'", "1e-03"])
def test_every_form_of_a_number_in_a_file(form: str, tmp_path: Path):
    config = parse_experiment(["--config", write(tmp_path, f"train:\n  learning_rate: {form}\n")])
    assert config.train.learning_rate == 0.001 and isinstance(config.train.learning_rate, float)


@pytest.mark.parametrize("form, value", [("1e-3", 0.001), ("3E-4", 0.0003), ("1e+0", 1.0), ("2", 2.0)])
def test_every_form_of_a_number_on_the_command_line(form: str, value: float):
    for arguments in (["--train.learning_rate", form], [f"--train.learning_rate={form}"]):
        assert parse_experiment(arguments).train.learning_rate == value


def test_underscores_and_lists(tmp_path: Path):
    text = "train: {steps: 1_000}\neval: {length_ratios: [1, 1e1, 2.5]}\n"
    config = parse_experiment(["--config", write(tmp_path, text), "--data.limit", "1_000"])
    assert (config.train.steps, config.data.limit, config.eval.length_ratios) == (1000, 1000, (1.0, 10.0, 2.5))


def test_command_line_beats_file_beats_default(tmp_path: Path):
    path = write(tmp_path, "model: {dim: 64, n_layers: 3}\ntrain: {compile: false}\n")
    config = parse_experiment(["--config", path, "--model.n_layers=5"])
    assert (config.model.dim, config.model.n_layers, config.model.n_heads) == (64, 5, 4)
    assert config.train.compile is False
    assert parse_experiment(["--train.compile=true"]).train.compile is True
    assert parse_experiment(["--train.compile=false"]).train.compile is False
    assert parse_experiment(["--train.compile", "auto"]).train.compile == "auto"


def test_resolved_settings_read_back_to_the_same(tmp_path: Path):
    config = parse_experiment(["--config", "small-sinusoidal.yaml", "--tracking.tags", "[a,b]", "--seed", "3"])
    again = parse_experiment(["--config", write(tmp_path, to_yaml(config))])
    assert again == config
    assert config.run_name == "small-sinusoidal-s3" and config.tracking.group == "small"


def differing(a: Experiment, b: Experiment) -> set[str]:
    from configs.run_folder import flatten

    a, b = (flatten(yaml.safe_load(to_yaml(x))) for x in (a, b))
    return {key for key in a | b if a.get(key) != b.get(key)}


def test_the_twins_differ_in_one_key():
    rope = parse_experiment(["--config", "small.yaml"])
    for twin in (["--config", "small-sinusoidal.yaml"], ["--config", "small.yaml", "--model.position", "sinusoidal"]):
        assert differing(rope, parse_experiment(twin)) == {"model.position"}
    assert rope.run_name == "small-rope"


@pytest.mark.parametrize("path", sorted(set(SHIPPED.glob("*.yaml")) - {SHIPPED / "sweep.yaml"}), ids=lambda p: p.name)
def test_every_shipped_file_loads_and_builds(path: Path):
    import torch

    from model.transformer import Transformer

    config = parse_experiment(["--config", path.name])
    with torch.device("meta"):
        model = Transformer(config.model, config.data.vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    millions = {
        "tiny": 0.04,
        "small": 1.1,
        "tinystories": 15.2,
        "wikitext103": 301,
        "pg19": 124,
        "fineweb-edu-124m": 124,
        "fineweb-edu-1b": 1076,
    }
    assert parameters / 1e6 == pytest.approx(millions[config.tracking.group], rel=0.1)


MISTAKES = {
    "unknown key": (
        "train:\n  learning_rte: 1e-3\n",
        [],
        "unknown key train.learning_rte",
        "did you mean train.learning_rate?",
    ),
    "other section": ("model:\n  context: 12\n", [], "unknown key model.context", "did you mean data.context?"),
    "hyphen": ("train:\n  batch-size: 1\n", [], "unknown key train.batch-size", "did you mean train.batch_size?"),
    "wrong type": ("model:\n  dim: wide\n", [], "model.dim", "wide"),
    "float for int": ("model:\n  dim: 64.5\n", [], "model.dim", "64.5"),
    "section as value": ("model: 3\n", [], "model in", "is a section"),
    "twice": ("seed: 1\nmodel:\n  dim: 2\nseed: 2\n", [], "'seed' stands twice, in lines 1 and 4", "settings.yaml"),
    "odd head dim": ("model: {dim: 30, n_heads: 2}\n", [], "model.dim 30", "odd head dim of 15"),
    "heads": ("model: {dim: 30, n_heads: 4}\n", [], "model.dim 30", "model.n_heads 4"),
    "odd width": (
        "model: {dim: 33, n_heads: 1, position: sinusoidal}\n",
        [],
        "model.dim 33 over model.n_heads 1",
        "odd head dim of 33",
    ),
    "vocabulary": ("data: {vocab_size: 100}\n", [], "data.vocab_size is 100", "at least 257"),
    "fp16": ("train: {precision: fp16}\n", ["--device=cpu"], "train.precision", "fp16"),
    "position": ("model: {position: ropee}\n", [], "'ropee'", "choose one of rope, sinusoidal, alibi, nope"),
    "scaling without rope": (
        "model: {position: alibi, rope: {scaling: {kind: yarn, factor: 4}}}\n",
        [],
        "model.rope.scaling.kind is yarn",
        "model.position is alibi",
    ),
    "scaling kind": (
        "model: {rope: {scaling: {kind: dinamic}}}\n",
        [],
        "'dinamic'",
        "choose one of none, linear, ntk, dynamic",
    ),
    "factor": (
        "model: {rope: {scaling: {kind: linear, factor: 0.5}}}\n",
        [],
        "model.rope.scaling.factor is 0.5",
        "1 or more",
    ),
    "fraction 0": ("model: {rope: {fraction: 0.0}}\n", [], "model.rope.fraction is 0.0", "above 0"),
    "fraction 1.5": ("seed: 1\n", ["--model.rope.fraction=1.5"], "model.rope.fraction is 1.5", "up to 1"),
    "stretching by nothing": (
        "model: {rope: {scaling: {kind: linear}}}\n",
        [],
        "kind linear stretches nothing",
        "factor",
    ),
    "trained length": ("model: {rope: {scaling: {kind: yarn, factor: 2}}}\n", [], "kind yarn needs", "trained_length"),
    "warm-up": ("train: {steps: 10, warmup_steps: 20}\n", [], "train.warmup_steps 20", "train.steps 10"),
    "micro": ("train: {batch_size: 10, micro_batch_size: 4}\n", [], "train.batch_size 10", "train.micro_batch_size 4"),
    "not YAML": ("a: [1\n", [], "settings.yaml is not valid YAML", "line"),
    "a list": ("- 1\n", [], "settings.yaml", "key: value"),
    "flag": ("seed: 1\n", ["--model.dmi", "3"], "unknown flag --model.dmi", "did you mean --model.dim?"),
    "abbreviation": ("seed: 1\n", ["--model.dropou", "0.1"], "unknown flag --model.dropou", "--model.dropout"),
    "junk": ("seed: 1\n", ["--train.learning_rate=5x"], "train.learning_rate", "5x"),
    "empty": ("seed: 1\n", ["--train.learning_rate="], "train.learning_rate", "float"),
    "nan": ("train: {learning_rate: .nan}\n", [], "train.learning_rate is nan", "finite"),
    "escape": ("name: ../up\n", [], "name is '../up'", "letters"),
    "device": ("device: tpu\n", [], "device is 'tpu'", "cuda"),
    "no path": ("data: {source: files}\n", [], "data.source is files", "data.path"),
    "base": ("base: nowhere.yaml\n", [], "nowhere.yaml does not exist", "small.yaml"),
    "block": ("data: {context: 16}\n", [], "eval.length_block 32", "data.context 16"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_exit_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    text, arguments, *words = MISTAKES[name]
    with pytest.raises(SystemExit) as stop:
        parse_experiment(["--config", write(tmp_path, text), *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and error.startswith("train.py: error: ")
    assert all(word in error for word in words), error


def test_a_file_that_is_its_own_base(tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        parse_experiment(["--config", write(tmp_path, "base: settings.yaml\n")])
    assert "itself as base" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config", "nowhere.yaml"], "config file nowhere.yaml does not exist; shipped are fineweb-edu-124m.yaml, "),
        (["--config", "small.yaml", "--model.dim", "30", "--model.n_heads", "2"], "odd head dim of 15"),
        (
            ["--config", "small.yaml", "--data.source", "files", "--data.path", "/nowhere/x.txt"],
            "/nowhere/x.txt matches no file",
        ),
        (["--config", "small.yaml", "--device", "cuda:7"], "device is cuda:7, but torch sees"),
        (["--config", "small.yaml", "--device", "cpu", "--train.precision", "bf16"], "slower than fp32 on a CPU"),
    ],
)
def test_the_program_itself_stops_before_data_is_read(arguments: list[str], words: str, tmp_path: Path):
    done = run_program(ROOT / "train.py", *arguments, "--data.cache_dir", tmp_path / "cache", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_key_and_its_default():
    done = run_program("train.py", "--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for words in (
        "--model.position",
        "--train.learning_rate",
        "default: 0.003",
        "--tracking.mode",
        "Peak learning rate.",
    ):
        assert words in text


def test_print_config_prints_the_resolved_settings():
    done = run_program("train.py", "--config", "small.yaml", "--model.position", "sinusoidal", "--print_config")
    assert done.returncode == 0
    values = yaml.safe_load(done.stdout)
    assert values["model"]["position"] == "sinusoidal" and values["tracking"]["group"] == "small"


def test_shipped_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert read_yaml("small.yaml")["tracking"]["group"] == "small"
    Path("small.yaml").write_text("seed: 5\n")
    assert read_yaml("small.yaml")["seed"] == 5  # a path comes first
