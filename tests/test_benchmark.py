"""Plans are counted again on the real model, and benchmarks are run as a user runs them."""

import json
import os
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_program
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from configs.schema import Experiment, parse_experiment
from model.config import ModelConfig
from model.loss import token_losses
from model.plan import HARDWARE, Plan, activation_bytes, plan, size
from model.transformer import Transformer
from scripts.benchmark import Contender, Timed, main, ratio
from train import make_optimizers

# A sweep is no config of a run.
SHIPPED = sorted(path.name for path in (ROOT / "configs").glob("*.yaml") if "program:" not in path.read_text())
SMALL = ModelConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=160)


def plan_of(experiment: Experiment, devices: int, kind: str, micro_batch_size: int | None) -> Plan:
    train = experiment.train
    return plan(
        experiment.model,
        experiment.data.vocab_size,
        experiment.data.context,
        steps=train.steps,
        batch_size=train.batch_size,
        checkpointing=False,
        micro_batch_size=micro_batch_size,
        bf16=True,
        devices=devices,
        hardware=HARDWARE[kind],
        utilisation=0.4,
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config_has_the_planned_parameters(name: str):
    experiment = parse_experiment(["--config", name])
    with torch.device("meta"):
        model = Transformer(experiment.model, experiment.data.vocab_size)
    planned = size(experiment.model, experiment.data.vocab_size, experiment.data.context)
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    assert planned.embedding == model.embedding.weight.numel()
    assert planned.block == sum(p.numel() for p in model.blocks[0].parameters())


@pytest.mark.parametrize("name", SHIPPED)
def test_plan_in_a_config_is_what_is_planned_now(name: str, capsys: pytest.CaptureFixture):
    text = (ROOT / "configs" / name).read_text()
    found = re.findall(r"^# python scripts/benchmark\.py (plan --config \S+ .*)\n((?:#   .*\n)+)", text, re.M)
    assert found or name in ("tiny.yaml", "small.yaml", "small-sinusoidal.yaml")
    for command, figures in found:
        assert f"--config {name}" in command
        main(shlex.split(command))
        assert capsys.readouterr().out.splitlines()[1:] == re.findall(r"^#   (.*)$", figures, re.M)


def test_a_plan_has_units_that_fit_its_size():
    tiny = plan_of(parse_experiment(["--config", "tiny.yaml"]), 1, "h100", None).lines()
    assert tiny["tokens"].startswith("51.2 k,") and tiny["FLOPs"].startswith("270.3 k ")
    large = replace(plan_of(parse_experiment(["--config", "fineweb-edu-1b.yaml"]), 1, "h100", 8), utilisation=0.001)
    assert large.lines()["time"].startswith("48,479 hours") and large.lines()["tokens"].startswith("25.17 G,")


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"position": "alibi"}, {"n_kv_heads": None}])
def test_flops_are_those_that_torch_counts(changes: dict):
    """Torch counts all of attention's products, those that causality hides included."""
    config, context, vocabulary = replace(SMALL, **changes), 48, 97
    model = Transformer(config, vocabulary)
    ids = torch.zeros(2, context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        token_losses(model(ids), ids).sum().backward()
    counted, planned = counter.get_total_flops() / ids.numel(), size(config, vocabulary, context)
    hidden = 0 if config.position == "alibi" else planned.attention
    assert planned.flops_per_token + hidden == counted


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("kv_heads", "checkpointing"), [(2, False), (4, False), (2, True)])
def test_activations_are_what_autograd_keeps(bf16: bool, kv_heads: int, checkpointing: bool):
    config = replace(SMALL, n_kv_heads=kv_heads)
    model, ids = Transformer(config, 97), torch.zeros(2, 256, dtype=torch.long)
    model.activation_checkpointing = checkpointing
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    # Kept alive until the end, so that no address is used twice.
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    if checkpointing:  # what goes into a block is kept by a closure, which no hook sees
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, inputs: (pack(inputs[0]), *inputs[1:]))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        hidden = model.hidden_states(ids)
    pack(hidden.bfloat16() if bf16 else hidden)  # which the head keeps
    # The cast weights are counted with the weights.
    cast = 2 * (size(config, 97, 256).matrices - model.embedding.weight.numel()) if bf16 and not checkpointing else 0
    found = (sum(storage.nbytes() for storage in kept.values()) - cast) / ids.numel()
    planned = activation_bytes(config, bf16, checkpointing)
    if checkpointing:  # the block that is made again comes and goes in the backward pass
        planned -= activation_bytes(config, bf16) - activation_bytes(
            replace(config, n_layers=config.n_layers - 1), bf16
        )
    assert hidden.requires_grad and planned == pytest.approx(found, rel=0.05)


def test_state_is_sixteen_bytes_a_parameter():
    experiment = parse_experiment(["--config", "tiny.yaml"])
    model = Transformer(experiment.model, experiment.data.vocab_size)
    (optimizer,) = make_optimizers(model, experiment.train)
    token_losses(model(torch.zeros(1, 8, dtype=torch.long)), torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
    planned = plan_of(experiment, 1, "h100", None)
    assert sum(t.nbytes for t in held) == planned.replicated - 2 * planned.size.matrices
    assert planned.tokens == experiment.train.steps * 4 * 32
    assert planned.seconds == pytest.approx(planned.tokens * planned.size.flops_per_token / 989e12 / 0.4)


def test_what_does_not_fit_is_told_what_does():
    experiment = parse_experiment(["--config", "fineweb-edu-124m.yaml"])
    assert plan_of(experiment, 1, "h200", 32).verdict(plan_of(experiment, 1, "h200", 32).replicated) == "fits"
    crowded = plan_of(experiment, 1, "rtx4090", None)
    advice = crowded.verdict(crowded.replicated)
    found = re.fullmatch(r"too much; fits with train.micro_batch_size (\d+)", advice)
    assert found, advice
    for sequences, fits in ((int(found[1]), True), (2 * int(found[1]), False)):
        again = plan_of(experiment, 1, "rtx4090", sequences)
        assert (again.verdict(again.replicated) == "fits") is fits
    large = parse_experiment(["--config", "fineweb-edu-1b.yaml"])
    alone, shared = plan_of(large, 1, "rtx4090", 1), plan_of(large, 8, "rtx4090", 1)
    assert alone.verdict(alone.replicated) == "too much; take more devices with FSDP, or a smaller model"
    assert shared.verdict(shared.replicated) == "too much; shard it with FSDP"
    assert shared.verdict(shared.sharded) == "fits"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--config=tiny.yaml", "--devices=3"], "train.batch_size 4 cannot be shared by 3 devices"),
        (["plan", "--config=tiny.yaml", "--utilisation=1.5"], "utilisation is 1.5"),
        (["plan", "--config=tiny.yaml", "--train.precision=fp32"], "train.precision is fp32"),
        (["generate"], "generate is no command"),
        (["train", "--rounds=0"], "rounds is 0"),
        (["train", "--rounds=1", "--shape=none.yaml"], "config file none.yaml does not exist"),
        (["train", "--round=1"], "did you mean --rounds?"),
        (["gpu"], "gpu needs a CUDA device"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str):
    if arguments == ["gpu"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run_program(ROOT / "scripts/benchmark.py", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_without_transformers_it_says_what_to_install(tmp_path: Path):
    (tmp_path / "transformers.py").write_text("raise ImportError")
    done = run_program(ROOT / "scripts/benchmark.py", "train", "--shape=tiny.yaml", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install -r requirements-dev.txt" in done.stderr


def test_ratio_is_of_rates_round_by_round():
    ours, theirs = Timed({"work": 200}, [1.0, 2.0, 1.0]), Timed({"work": 100}, [2.0, 2.0, 6.0])
    # 200/1 over 100/2, 200/2 over 100/2, 200/1 over 100/6.
    assert ratio("key", ours, theirs) == {"key": 4.0, "key_middle_half": [2.0, 12.0]}
    assert ratio("key", ours, theirs, factor=0.5)["key"] == 2.0
    assert (ours.rate, theirs.rate) == (200, 50)


def test_contender_that_waits_does_not_compute():
    contender = Contender(["--config=small.yaml", "--turn_steps=2"])
    try:
        status = Path(f"/proc/{contender.answer()['pid']}/stat")

        def processor_seconds() -> float:
            return sum(map(int, status.read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

        took, before = contender.turn(), processor_seconds()
        assert took > 0 and before > 0
        time.sleep(1)
        assert processor_seconds() - before < 0.2
        assert contender.process.poll() is None
    finally:
        contender.end()


QUICK = ("--shape=tiny.yaml", "--vocab_size=300", "--rounds=2", "--steps=1")


@pytest.mark.parametrize(
    ("arguments", "names", "keys"),
    [
        (["train", *QUICK], ["transformers", "ropewalk"], ["ratio_to_transformers_eager", "sgemm_fraction"]),
        pytest.param(
            ["encodings", *QUICK],
            ["rope", "sinusoidal", "alibi", "nope"],
            ["alibi_to_rope"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["decode", *QUICK, "--new_tokens=6"],
            ["transformers", "ropewalk", "ropewalk, 16 rows", "ropewalk, no cache"],
            ["ratio_to_transformers", "ratio_to_uncached", "batch_16_ratio"],
            marks=pytest.mark.slow,
        ),
        (
            ["prepare", "--megabytes=0.2", "--rounds=1"],
            ["train a tokenizer and encode", "encode with a ready tokenizer", "tokenizers' encode_batch_fast"],
            ["ratio_to_encode_batch_fast", "bytes_per_second"],
        ),
        pytest.param(
            ["startup", "--rounds=1"],
            ["help_seconds", "first_step_seconds"],
            ["help_seconds", "first_step_seconds"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["train", *QUICK, "--compile"],
            ["transformers", "ropewalk", "transformers compiled", "ropewalk compiled"],
            ["ratio_to_transformers_eager", "ratio_to_transformers_compiled", "sgemm_fraction"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["decode", *QUICK, "--new_tokens=6", "--compile"],
            [
                "transformers",
                "ropewalk",
                "transformers compiled",
                "ropewalk compiled",
                "ropewalk, 16 rows",
                "ropewalk, no cache",
            ],
            ["ratio_to_transformers_compiled", "batch_16_ratio"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["scaling", "--shape=tiny.yaml", "--rounds=1", "--steps=1"],
            [f"context {n}" for n in (128, 256, 512, 1024, 2048)] + [f"dim {n}" for n in (64, 128, 192, 256, 384)],
            [],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["train", "encodings", "decode", "prepare", "startup", "train-compiled", "decode-compiled", "scaling"],
)
def test_benchmark_writes_what_it_prints(arguments: list[str], names: list[str], keys: list[str], tmp_path: Path):
    done = run_program(ROOT / "scripts/benchmark.py", *arguments, f"--json={tmp_path / 'out.json'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["command"] == arguments[0]
    assert [row["name"] for row in written["rows"]] == names
    assert all(f"\n{name}" in done.stdout for name in names)
    assert all(written[key] > 0 for key in keys)
    numbers = [value for row in written["rows"] for value in row.values() if not isinstance(value, str)]
    assert min(numbers) > 0


def test_plan_is_written_in_numbers(tmp_path: Path):
    file = tmp_path / "plan.json"
    arguments = ["plan", "--config=tiny.yaml", "--devices=2", "--device_kind=cpu", f"--json={file}"]
    done = run_program(ROOT / "scripts/benchmark.py", *arguments)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["parameters"] == 43168 and written["sequences"] == 2
    # A processor makes between one and ten thousand GFLOP/s, and has the memory that the system says it has.
    assert 1e9 < written["hardware"]["flops"] < 1e13
    assert written["hardware"]["memory"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert written["seconds"] * written["hardware"]["flops"] * 2 * 0.4 == pytest.approx(
        written["flops_per_token"] * 400 * 4 * 32
    )
