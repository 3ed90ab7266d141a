"""Properties that hold for whatever hypothesis thinks of: settings, batches, tokenizers, checkpoints, sampling."""

import dataclasses
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from configs.schema import EvalConfig, Experiment, SettingsError, TrainConfig, parse_experiment, to_yaml
from configs.tracking import TrackingConfig
from data import batches
from data.config import DataConfig
from data.prepare import Tokens, prepare
from data.tokenizer import byte_lengths, end_of_text_id, token_bytes, train_tokenizer
from model import checkpoint
from model.config import SCALING_KINDS, ModelConfig, RopeConfig, ScalingConfig, SinusoidalConfig
from model.generation import sample_next
from model.positions import ENCODINGS
from model.transformer import Transformer

# --- settings

# To shrink an example of many settings takes minutes.
PLAIN = settings(phases=[Phase.generate], max_examples=10)
# What a file name or a note may look like: numbers, YAML and quotes among them. A NUL ends an argument of a program.
TEXTS = st.one_of(
    st.sampled_from(["1e-3", "007", "1_000", "true", "~", "# x", "&a", "[a", "{a: b}", "a: b", "'q'", " x ", "-", "--x", "é\n"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
).filter(lambda text: text.strip() != "null")  # fmt: skip
SHARES = st.floats(0.001, 0.999)
POSITIVE = st.floats(1e-30, 1e30)
COUNTS = st.integers(1, 10**12)


@st.composite
def model_configs(draw: st.DrawFn, most: int = 10**6) -> ModelConfig:
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * groups
    position = draw(st.sampled_from(sorted(ENCODINGS)))
    kind = draw(st.sampled_from(sorted(SCALING_KINDS))) if position == "rope" else "none"
    slow = draw(st.floats(0.5, 2))
    scaling = ScalingConfig(
        kind,
        draw(st.floats(1.01, 64)),
        draw(st.integers(1, most)),
        slow + draw(st.floats(0.5, 64)),
        slow,
        slow + 1,
        slow,
    )
    return ModelConfig(
        position=position,
        dim=heads * 2 * draw(st.integers(2, 4)),
        n_layers=draw(st.integers(1, 3)),
        n_heads=heads,
        n_kv_heads=draw(st.sampled_from([kv_heads, None])),
        ffn_dim=draw(st.integers(1, 40)),
        window=draw(st.none() | st.integers(1, most)),
        tie_embeddings=draw(st.booleans()),
        dropout=draw(st.floats(0, 0.9)),
        init_std=draw(st.floats(0.001, 1)),
        embedding_rms=draw(st.floats(0.001, 1)),
        rope=RopeConfig(draw(st.floats(2, 1e9)), draw(st.floats(0.01, 1)), scaling),
        sinusoidal=SinusoidalConfig(draw(st.floats(0.01, 100))),
    )


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    steps, micro = draw(COUNTS), draw(st.integers(1, 64))
    source = draw(st.sampled_from(["sotu", "hub", "files"]))
    data = DataConfig(
        source=source,
        path=draw(TEXTS),
        subset=draw(st.none() | TEXTS),
        split=draw(TEXTS),
        revision=draw(st.none() | TEXTS),
        text_column=draw(TEXTS),
        streaming=draw(st.booleans()),
        limit=draw(COUNTS),
        val_fraction=draw(SHARES),
        split_seed=draw(st.integers()),
        tokenizer=draw(st.none() | TEXTS),
        vocab_size=draw(st.integers(257, 10**6)),
        context=draw(st.integers(64, 10**6)),
        cache_dir=draw(TEXTS),
    )
    optimizer, parallel, sharded = draw(
        st.sampled_from(
            [("adamw", "auto", False), ("muon", "ddp", False), ("adamw", "fsdp", False), ("adamw", "fsdp", True)]
        )
    )
    train = TrainConfig(
        steps=steps,
        batch_size=micro * draw(st.integers(1, 64)),
        micro_batch_size=draw(st.sampled_from([micro, None])),
        learning_rate=draw(POSITIVE),
        warmup_steps=draw(st.integers(0, steps)),
        schedule=draw(st.sampled_from(["cosine", "wsd"])),
        optimizer=optimizer,
        parallel=parallel,
        sharded_checkpoints=sharded,
        activation_checkpointing=draw(st.booleans()),
        decay_fraction=draw(st.floats(0, 1)),
        min_lr_ratio=draw(st.floats(0, 1)),
        weight_decay=draw(POSITIVE),
        beta1=draw(SHARES),
        beta2=draw(SHARES),
        grad_clip=draw(POSITIVE),
        precision=draw(st.sampled_from(["auto", "fp32", "bf16"])),
        compile=draw(st.sampled_from([True, False, "auto"])),
        log_every=draw(COUNTS),
        save_every=draw(COUNTS),
        keep_checkpoints=draw(st.integers(2, 9)),
    )
    evaluation = EvalConfig(
        every=draw(COUNTS),
        windows=draw(COUNTS),
        batch_tokens=draw(COUNTS),
        length_ratios=tuple(draw(st.lists(st.floats(0.5, 100), min_size=1, max_size=4))),
        length_block=draw(st.integers(1, 31)),
        length_targets=draw(COUNTS),
        sample_prompt=draw(TEXTS),
        sample_tokens=draw(st.integers(0, 99)),
    )
    tracking = TrackingConfig(
        mode=draw(st.sampled_from(["auto", "online", "offline", "disabled"])),
        project=draw(TEXTS),
        entity=draw(st.none() | TEXTS),
        group=draw(st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,9}\Z")),
        tags=tuple(draw(st.lists(TEXTS.filter(str.isprintable), max_size=3))),
        notes=draw(st.none() | TEXTS),
    )
    return Experiment(
        draw(model_configs()), data, train, evaluation, tracking,
        name=draw(st.none() | st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,9}\Z").filter(lambda name: name != "null")),
        seed=draw(st.integers(0, 2**63 - 1)), out_dir=draw(TEXTS), resume=draw(st.booleans()),
        init_from=draw(st.none() | TEXTS), device=draw(st.sampled_from(["auto", "cpu", "mps", "cuda", "cuda:3"])),
    )  # fmt: skip


def flags(values: dict[str, Any], prefix: str = "") -> list[str]:
    """The command line that gives all of these settings."""
    made = []
    for key, value in values.items():
        if isinstance(value, dict):
            made += flags(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            made.append(f"--{prefix}{key}={text}")
    return made


@settings(PLAIN)
@given(experiments(), st.randoms(use_true_random=False))
def test_all_settings_come_out_as_given_in_a_file_or_as_flags_or_mixed(config: Experiment, chance: Any):
    given_flags = flags(dataclasses.asdict(config))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        assert parse_experiment(given_flags) == config
        assert parse_experiment(["--config", str(path)]) == config
        some = [flag for flag in given_flags if chance.random() < 0.5]
        chance.shuffle(some)
        assert parse_experiment(["--config", str(path), *some]) == config


def forms(number: float) -> list[str]:
    """Ways to write a number of six digits, as people do."""
    texts = [f"{number:.5e}", f"{number:.5E}", f"{number:.5e}".replace("e+", "e"), f"{number:.5f}", f"'{number:.5e}'"]
    return [text for text in texts if math.isclose(float(text.strip("'")), number, rel_tol=1e-9)]


@settings(PLAIN)
@given(st.integers(1, 999_999), st.integers(-20, 20), st.integers(1, 10**9), st.data())
def test_every_form_of_a_number_is_that_number(digits: int, exponent: int, steps: int, data: st.DataObject):
    rate = float(f"{digits}e{exponent}")
    count = data.draw(st.sampled_from([f"{steps:_}", str(steps), f"{steps:,}".replace(",", "_")]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        text = data.draw(st.sampled_from(forms(rate)))
        path.write_text(f"train:\n  learning_rate: {text}\n  steps: {count}\n  warmup_steps: 0\n")
        in_file = parse_experiment(["--config", str(path)])
    as_flags = parse_experiment(
        [f"--train.learning_rate={text.strip(chr(39))}", f"--train.steps={count}", "--train.warmup_steps=0"]
    )
    for config in (in_file, as_flags):
        assert config.train.learning_rate == float(text.strip("'")) and config.train.steps == steps


# --- batches


@given(st.integers(0, 400), st.integers(1, 40), st.integers(1, 7), st.integers(0, 2**63 - 1), st.data())
def test_every_target_is_read_once_an_epoch_however_the_shards_are_cut(
    size: int, context: int, batch: int, seed: int, data: st.DataObject
):
    ids = np.arange(size, dtype=np.uint16)
    cuts = data.draw(st.lists(st.integers(0, size), max_size=4).map(sorted))
    tokens = Tokens(np.split(ids, cuts))
    windows = batches.window_count(tokens, context)
    assert windows == (max(0, size - 1) // context)
    if not windows:
        return
    order = batches.TrainingOrder(windows, batch, seed)
    stream = np.concatenate([order.at(step) for step in range(-(-2 * windows // batch))])
    for epoch in (stream[:windows], stream[windows : 2 * windows]):
        x, y = batches.cut(tokens, epoch * context, context)
        assert (y == x + 1).all() and sorted(y.flatten()) == list(range(1, windows * context + 1))


@given(st.integers(1, 10**9), st.integers(1, 8), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_one_two_or_three_processes_read_the_same_windows_in_the_same_order(
    windows: int, share: int, seed: int, step: int
):
    """A process reads its part of a step as if the batch were only that part; the parts in order are the batch."""
    for processes in (1, 2, 3):
        whole = batches.TrainingOrder(windows, share * processes, seed).at(step)
        own = batches.TrainingOrder(windows, share, seed)
        parts = [own.at(step * processes + process) for process in range(processes)]
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert whole.min() >= 0 and whole.max() < windows


# --- tokenizer

ODD_TEXTS = st.one_of(
    st.text(),
    st.binary().map(lambda content: content.decode("latin-1")),
    st.binary().map(lambda content: content.decode("utf-8", "replace")),
    st.lists(st.sampled_from(["<|endoftext|>", "</s>", "\r\n", "\0", "\ufeff", "é", "🙂", " "])).map("".join),
)
TOKENIZER = train_tokenizer(["the rope walks 東京 🙂 ünder </s> " * 20], 330)


@given(ODD_TEXTS)
@example("".join(map(chr, [*range(0xD800), *range(0xE000, 0x3000), 0x10FFFF])))
def test_any_text_survives_and_its_bytes_add_up(text: str):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    table = token_bytes(TOKENIZER)
    assert TOKENIZER.decode(ids) == text and end_of_text_id(TOKENIZER) not in ids
    assert b"".join(table[i] for i in ids) == text.encode()
    assert byte_lengths(TOKENIZER)[ids].sum() == len(text.encode())


@settings(max_examples=20)
@given(st.lists(ODD_TEXTS, min_size=2, max_size=5), st.booleans())
def test_any_documents_survive_the_way_to_disk_and_back(texts: list[str], json_lines: bool):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if json_lines:
            rows = [json.dumps({"text": text}, ensure_ascii=bool(len(text) % 2)) for text in texts]
            (folder / "rows.jsonl").write_bytes("\n".join(rows).encode())
        else:
            for number, text in enumerate(texts):
                (folder / f"{number}.txt").write_bytes(text.encode())
        config = DataConfig(source="files", path=name, cache_dir=f"{name}/cache", vocab_size=280, val_fraction=0.4)
        data = prepare(config, lambda _: None)
        found = []
        for split in ("train", "val"):
            tokens, starts = data.tokens(split), data.document_starts(split).tolist()
            for start, stop in itertools.pairwise(starts):
                found.append(data.tokenizer.decode(tokens.read(start, stop - 1).tolist()))
    assert sorted(found) == sorted(text for text in texts if text)


# --- checkpoints


@settings(PLAIN, max_examples=25)
@given(model_configs(most=50), st.integers(1, 60), st.integers(0, 10**7 - 1), st.none() | st.floats(0, 1e6), st.data())
def test_a_checkpoint_gives_back_any_small_model(
    config: ModelConfig, vocab: int, step: int, val_loss: float | None, data: st.DataObject
):
    model = Transformer(config, vocab, data.draw(st.integers(0, 2**63 - 1)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]))
    saved = {
        "state": {0: {"step": torch.tensor(float(step)), "x": torch.arange(6).to(dtype)}},
        "groups": [{"lr": 1e-3}],
    }
    state = {"step": step, "val_loss": val_loss, "pending": [0.1, 1 / 3], "context": 8}
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(Path(folder) / "checkpoints", model, saved, state)
        assert checkpoint.latest(Path(folder)) == path and [p.name for p in path.parent.iterdir()] == [path.name]
        loaded, optimizer, facts = (
            checkpoint.load_model(path),
            checkpoint.load_optimizer(path),
            checkpoint.read_state(path),
        )
    assert loaded.config == config and loaded.vocab_size == vocab
    assert {name: facts[name] for name in state} == state
    assert optimizer["groups"] == saved["groups"] and optimizer["state"][0]["x"].dtype == dtype
    assert all(torch.equal(optimizer["state"][0][name], saved["state"][0][name]) for name in ("step", "x"))
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.arange(10)[None] % vocab
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), loaded.eval()(ids))


# --- sampling


def kept(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Ids that may be drawn and their probabilities, by the words of sample_next, in Python's numbers."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None]
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    total, before, chosen = math.fsum(weights.values()), 0.0, {}
    for i in order:
        # Where fp32 and these numbers could disagree about reaching top_p, there is nothing to test.
        assume(top_p == 1 or abs(before - top_p) > 1e-5)
        if before >= top_p and chosen and top_p < 1:
            break
        chosen[i] = weights[i]
        before += weights[i] / total
    rest = math.fsum(chosen.values())
    return {i: weight / rest for i, weight in chosen.items()}


@given(
    st.lists(st.integers(-80, 80), min_size=1, max_size=12, unique=True).map(lambda tens: [n / 20 for n in tens]),
    st.floats(0.05, 5),
    st.integers(0, 14),
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
)
def test_draws_follow_what_the_filters_keep(logits: list[float], temperature: float, top_k: int, top_p: float):
    """Never an id outside, always the likeliest and the one that crosses top_p, and probabilities that sum to one."""
    expected = kept(logits, temperature, top_k, top_p)
    draws, generator = 4000, torch.Generator().manual_seed(0)
    rows = torch.tensor([logits]).expand(draws, -1)
    counts = torch.bincount(
        sample_next(rows, [generator] * draws, temperature, top_k, top_p), minlength=len(logits)
    ).tolist()
    assert max(expected, key=expected.get) == logits.index(max(logits))
    for i, count in enumerate(counts):
        p = expected.get(i, 0.0)
        # Six standard deviations, and three draws for what is too rare to be normal; exactly none outside.
        assert abs(count - draws * p) <= (6 * math.sqrt(draws * p * (1 - p)) + 3 if p else 0)
        assert count or p < 0.005


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=20), st.integers(0, 25), st.floats(0, 1))
def test_without_temperature_the_likeliest_is_drawn_whatever_the_filters(scores: list[float], k: int, p: float):
    logits = torch.tensor([scores])
    assert sample_next(logits, None, 0.0, k, p).tolist() == [int(logits.argmax())]


def test_the_strategies_reach_every_setting():
    """A key that is added and not drawn above would be tested at its default only."""
    seen: dict[str, set[str]] = {}

    @settings(PLAIN, max_examples=40)
    @given(experiments())
    def draw(config: Experiment) -> None:
        for flag in flags(dataclasses.asdict(config)):
            key, _, value = flag.partition("=")
            seen.setdefault(key, set()).add(value)

    draw()
    assert {key for key, values in seen.items() if len(values) < 2} == set()
    with pytest.raises(SettingsError):
        dataclasses.replace(Experiment(), seed=-1)
