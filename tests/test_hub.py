"""What transformers makes of an exported run, what we make of a Llama, and that both ways together change no bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import run_program
from tokenizers import Tokenizer

from configs.schema import EvalConfig, Experiment, to_yaml
from data.config import DataConfig
from data.tokenizer import fingerprint, load_tokenizer, train_tokenizer, vocabulary_size
from model import checkpoint
from model.config import ModelConfig, RopeConfig, ScalingConfig
from model.generation import KVCache, generate
from model.hub import load_llama
from model.transformer import Transformer
from scripts import export_hf, import_hf
from scripts import generate as generate_script

TRAINED = 64
KINDS = ("linear", "ntk", "dynamic", "yarn", "llama3")
MODELS = {
    "plain": {},
    "untied": {"tie_embeddings": False},
    "grouped": {"n_kv_heads": 2},
    "base": {"rope": RopeConfig(500.0), "n_kv_heads": 1},
    "scaled embeddings": {"embedding_rms": 0.11},
    "untied scaled embeddings": {"embedding_rms": 0.11, "tie_embeddings": False},
    "trained with yarn": {"rope": RopeConfig(scaling=ScalingConfig("yarn", 2.0, 48, beta_fast=4, beta_slow=0.5))},
    "trained with llama3": {"rope": RopeConfig(2000.0, scaling=ScalingConfig("llama3", 2.0, 48, low_freq_factor=0.5))},
    "trained with dynamic": {"rope": RopeConfig(scaling=ScalingConfig("dynamic", 2.0, 48))},
    "trained with linear": {"rope": RopeConfig(scaling=ScalingConfig("linear", 2.0))},
}
# Models as they were trained, and one of them stretched on export.
CASES = [(name, ()) for name in MODELS]
CASES += [("base", (f"--model.rope.scaling.kind={kind}", "--model.rope.scaling.factor=4")) for kind in KINDS]
NAMES = [" ".join((name, *(flag.rpartition("=")[2] for flag in flags))) for name, flags in CASES]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]):
    return train_tokenizer(texts, 300)


@pytest.fixture
def make_run(tmp_path: Path, tokenizer):
    """Makes the run folder of a fresh model; init_std is large so that attention matters."""

    def make(tokenizer: Tokenizer = tokenizer, **changes: object) -> Path:
        shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 80, "init_std": 0.3}
        config = ModelConfig(**{**shape, **changes})
        run = tmp_path / "run"
        state = {"step": 7, "tokens": 700, "context": TRAINED, "tokenizer_sha256": fingerprint(tokenizer)}
        model = Transformer(config, vocabulary_size(tokenizer), seed=1)
        with torch.no_grad():
            (model.embedding if config.tie_embeddings else model.head).weight.mul_(8)  # logits of about 1
        checkpoint.save(run / "checkpoints", model, {}, state)
        tokenizer.save(str(run / "tokenizer.json"))
        settings = Experiment(model=config, data=DataConfig(context=TRAINED), eval=EvalConfig(length_block=8))
        (run / "config.yaml").write_text(to_yaml(settings))
        return run

    return make


def exported(run: Path, *flags: str) -> Path:
    export_hf.main([str(run), str(run.parent / "out"), *flags])
    return run.parent / "out"


def stretched(run: Path, flags: tuple[str, ...]) -> Transformer:
    """The model as scripts/generate.py would read it with the same flags."""
    kind = flags[0].partition("=")[2] if flags else None
    path = checkpoint.latest(run)
    return checkpoint.load_model(path, scaling=ScalingConfig(kind, 4.0) if kind else None).eval()


def theirs(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ids(vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name, flags", CASES, ids=NAMES)
def test_logits_in_transformers_and_the_way_back(make_run, name: str, flags: tuple[str, ...]):
    run = make_run(**MODELS[name])
    folder, ours = exported(run, *flags), stretched(run, flags)
    llama = theirs(folder)
    x = ids(ours.vocab_size, 2, 4 * TRAINED)
    with torch.no_grad():
        for length in (16, TRAINED, TRAINED + 1, 4 * TRAINED):
            here, there = ours(x[:, :length]), llama(input_ids=x[:, :length]).logits
            assert (here - there).abs().max() < 1e-4 and here.std() > 0.5
    assert llama.config.max_position_embeddings == {
        "trained with dynamic": 48, "trained with yarn": 96, "trained with llama3": 96,
    }.get(name, TRAINED * (4 if flags and "dynamic" not in flags[0] else 1))  # fmt: skip

    back, longest = load_llama(folder)
    assert longest == llama.config.max_position_embeddings
    with torch.no_grad():
        assert torch.equal(back.eval()(x), ours(x)) or "ntk" in str(flags)
    if name != "untied scaled embeddings":
        assert back.state_dict().keys() == ours.state_dict().keys()
        assert all(torch.equal(back.state_dict()[key], tensor) for key, tensor in ours.state_dict().items())
        assert back.config.embedding_rms == ours.config.embedding_rms
    if "ntk" not in str(flags):  # comes back as the base it amounts to
        read = ours.config.rope.scaling
        known = replace(read, trained_length=None) if read.kind == "linear" else read
        assert back.config.rope == replace(ours.config.rope, scaling=known)


def test_without_the_change_of_rows_logits_differ(make_run):
    run = make_run()
    folder = exported(run)
    weights, ours = safetensors.torch.load_file(folder / "model.safetensors"), stretched(run, ()).state_dict()
    weights["model.layers.0.self_attn.q_proj.weight"] = ours["blocks.0.attention.qkv"][:32].clone()
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    x = ids(250, 1, 32)
    with torch.no_grad():
        assert (stretched(run, ())(x) - theirs(folder)(input_ids=x).logits).abs().max() > 0.05


# Reading 200 tokens twice takes seconds a case: one of every kind here, the rest with the slow tests.
QUICK_NAMES = ("plain", "grouped", "yarn", "llama3", "dynamic", "linear")
GREEDY = [
    pytest.param(*case, id=name, marks=[] if name in QUICK_NAMES else pytest.mark.slow)
    for case, name in zip(CASES, NAMES, strict=True)
]


@pytest.mark.parametrize("name, flags", GREEDY)
def test_greedy_text_is_that_of_transformers(make_run, name: str, flags: tuple[str, ...]):
    """200 tokens, three times past the trained length, with the generation settings that are exported."""
    # Large weights write varied text, which the cache of dynamic changes.
    run = make_run(**{"init_std": 0.6, **MODELS[name]})
    folder, ours = exported(run, *flags), stretched(run, flags)
    prompt = torch.randint(ours.vocab_size, (1, 5), generator=torch.Generator().manual_seed(3))
    logits = []

    def watched(tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        logits.append(ours.last_logits(tokens, cache))
        return logits[-1]

    made = [token for (token,) in generate(ours, prompt.tolist(), 200, temperature=0.0, forward=watched)]
    best = torch.cat(logits).topk(2).values
    # No choice hangs on less than what the logits may differ by.
    assert (best[:, 0] - best[:, 1]).min() > 1e-4 and len(set(made)) > 30
    llama = theirs(folder)
    llama.generation_config.eos_token_id = None  # neither stops early
    text = llama.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)
    assert text[0, 5:].tolist() == made


def test_tokenizer_gives_the_same_ids(make_run, tokenizer):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(exported(make_run()))
    ours = load_tokenizer(Path(loaded.name_or_path) / "tokenizer.json")
    for text in ("the rope", "  walks\n\n along", "\n", "🙂 東京 ünder", " a ,b .", "the<|endoftext|>rope", "\r\n\t\0"):
        assert loaded(text).input_ids == ours.encode(text).ids and loaded.decode(loaded(text).input_ids) == text
    assert loaded.eos_token_id == loaded.bos_token_id == 0 not in loaded("<|endoftext|>").input_ids


def test_the_last_id_of_a_vocabulary_with_unused_ids_is_written_and_kept(make_run, tokenizer, tmp_path: Path, capsys):
    values = json.loads(tokenizer.to_str())
    values["model"]["vocab"]["Ġstraight"] = len(values["model"]["vocab"]) + 5
    folder = exported(make_run(Tokenizer.from_str(json.dumps(values))))
    import_hf.main([str(folder), str(tmp_path / "back")])
    texts = []
    for run in (tmp_path / "run", tmp_path / "back"):
        capsys.readouterr()
        generate_script.main([str(run), "--samples=16", "--temperature=1000000", "--top_k=0", "--json"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and " straight" in texts[0]


def test_export_import_export_changes_no_byte(make_run, tmp_path: Path):
    first = exported(make_run(embedding_rms=0.11, n_kv_heads=2))
    import_hf.main([str(first), str(tmp_path / "imported")])
    export_hf.main([str(tmp_path / "imported"), str(tmp_path / "second")])
    for name in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (tmp_path / "second" / name).read_bytes() == (first / name).read_bytes(), name


LLAMA = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"rms_norm_eps": 1e-2, "tie_word_embeddings": True},
        {
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
        {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 300.0}},
    ],
)
def test_a_llama_made_by_transformers(settings: dict, tmp_path: Path):
    """Sharded, in bf16, with any eps of its norms, and a vocabulary rounded up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA, **settings, max_position_embeddings=64, initializer_range=0.3))
    llama.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    ours, longest = load_llama(tmp_path)
    x = ids(320, 2, 100)
    with torch.no_grad():
        assert (ours.eval()(x) - theirs(tmp_path)(input_ids=x).logits).abs().max() < 1e-4
    assert longest == 64 and ours.config.tie_embeddings == settings.get("tie_word_embeddings", False)


def test_rope_settings_of_older_files(make_run):
    """rope_theta beside rope_scaling, whose kind is called `type`, is what most files on the hub have."""
    folder = exported(make_run())
    values = json.loads((folder / "config.json").read_text())
    del values["rope_parameters"], values["rope_theta"], values["rope_scaling"]

    def rope(**changes: object) -> RopeConfig:
        (folder / "config.json").write_text(json.dumps(values | changes))
        return load_llama(folder)[0].config.rope

    assert rope() == RopeConfig(10000.0)
    assert rope(rope_theta=500000) == RopeConfig(500000.0)
    assert rope(rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2}).scaling == ScalingConfig("linear", 2)
    assert rope(rope_scaling={"type": "dynamic", "factor": 2.0}).scaling == ScalingConfig("dynamic", 2.0, TRAINED)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 5.0}
    read = rope(rope_scaling={**llama3, "original_max_position_embeddings": 16}).scaling
    assert read == ScalingConfig("llama3", 8.0, 16, high_freq_factor=5.0)


def refused(main, capsys, *arguments: object) -> str:
    """The one line of a refusal."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and said.err.count("\n") == 1, said
    return said.err


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"position": "sinusoidal"}, "model.position is sinusoidal, which Llama cannot express"),
        ({"position": "alibi"}, "model.position is alibi"),
        ({"position": "nope"}, "model.position is nope"),
        ({"rope": RopeConfig(fraction=0.5)}, "model.rope.fraction is 0.5"),
        ({"window": 16}, "model.window is 16"),
    ],
)
def test_what_llama_cannot_express_is_refused(make_run, tmp_path: Path, capsys, changes: dict, words: str):
    assert words in refused(export_hf.main, capsys, make_run(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_places_are_refused(make_run, tmp_path: Path, capsys):
    run = make_run()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine")
    for main, source in ((export_hf.main, run), (import_hf.main, exported(run))):
        assert "used exists and is not empty" in refused(main, capsys, source, tmp_path / "used")
        assert "no" in refused(main, capsys, tmp_path / "nowhere", tmp_path / "new")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["mine.txt"] and not (tmp_path / "new").exists()
    assert "did you mean --push_to" in refused(export_hf.main, capsys, run, tmp_path / "new", "--pushto=me/it")
    assert "give the trained length as --context" in refused(import_hf.main, capsys, "a", "b", "--data.context=9")


def test_pushing_needs_an_account(make_run, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    line = refused(export_hf.main, capsys, make_run(), tmp_path / "out", "--push_to=me/it")
    assert "push_to is me/it, but you are not logged in" in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "mistral"}, "has model_type mistral: only llama"),
        ({"attention_bias": True}, "has attention_bias True: only False"),
        ({"mlp_bias": True}, "has mlp_bias True"),
        ({"hidden_act": "gelu"}, "has hidden_act gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "has hidden_size None: it must be a whole number"),
        ({"head_dim": 16}, "has head_dim 16"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0"),
        ({"vocab_size": 299}, "has 300 ids and the model 299"),
        ({"intermediate_size": 81}, "do not fit its config.json"),
        ({"num_key_value_heads": 2}, "do not fit its config.json"),
        ({"num_hidden_layers": 1}, "has a weight model.layers.1."),
        ({"num_hidden_layers": 3}, "has no weight model.layers.2."),
        ({"tie_word_embeddings": False}, "has no weight lm_head.weight"),
        ({"rope_theta": 5.0}, "two values of rope_theta, 5.0 and 10000.0"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "has rope_type longrope: only default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "has rope_type linear without a factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "has truncate False"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}}, "attention_factor 1.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 1.0}}, "mscale 0.7"),
    ],
)  # fmt: skip
def test_a_llama_unlike_ours_is_refused(make_run, tmp_path: Path, capsys, changes: dict, words: str):
    folder = exported(make_run())
    values = json.loads((folder / "config.json").read_text())
    if "vocab_size" in changes:
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:299].clone()
        safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values | changes))
    assert words in refused(import_hf.main, capsys, folder, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_missing_and_damaged_files_are_refused(make_run, tmp_path: Path, capsys):
    whole = exported(make_run())

    def says(name: str, content: bytes | None, also: str = "") -> str:
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy, dirs_exist_ok=True)
        (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
        if also:
            (copy / also).write_text("anything")
        line = refused(import_hf.main, capsys, copy, tmp_path / "imported")
        shutil.rmtree(copy)
        return line

    assert "has no tokenizer.json" in says("tokenizer.json", None)
    assert "config.json cannot be read" in says("config.json", None)
    assert "config.json cannot be read" in says("config.json", b"[")
    assert "model.safetensors is missing" in says("model.safetensors", None)
    assert "is a pickle, which can run code" in says("model.safetensors", None, also="pytorch_model.bin")
    assert "is missing or damaged" in says("model.safetensors", (whole / "model.safetensors").read_bytes()[:-9])
    assert not (tmp_path / "imported").exists()


def test_programs_on_a_trained_run(small_run: list[str], tmp_path: Path, capsys):
    """Train, export, import, move, measure: the length curve of the imported model is that of the run."""
    run, folder, imported = tmp_path / "runs/run", tmp_path / "hf", tmp_path / "moved"

    def program(*arguments: object) -> str:
        done = run_program(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    program("train.py", *small_run)
    program("scripts/export_hf.py", run, folder)
    page = (folder / "README.md").read_text()
    assert "in 20 steps, in windows of 32 tokens" in page and "Loss by context: the same 64 targets" in page
    assert "bits per byte.\n" in page and "val_fraction: 0.25" in page and "{" not in page.partition("RoPE as")[0]
    data = [flag for flag in small_run if flag.startswith("--data") and "vocab" not in flag]
    program("scripts/import_hf.py", folder, tmp_path / "runs/imported", *data)
    settings = ["--train.steps=2", "--train.warmup_steps=1", "--eval.windows=4", "--eval.length_targets=16"]
    start = [f"--config={tmp_path / 'runs/imported/config.yaml'}", f"--init_from={tmp_path / 'runs/imported'}"]
    assert "after 2 steps" in program("train.py", *start, "--name=tuned", "--tracking.mode=disabled", *settings)
    (tmp_path / "runs/imported").rename(imported)
    texts = []
    for folder in (run, imported):
        generate_script.main([str(folder), "--prompt=the rope", "--temperature=0", "--max_new_tokens=40"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 30
    program("scripts/evaluate.py", imported, "--targets=64", "--copies=2", "--variants=false")
    curves = [json.loads((path / "lengths.json").read_text())["by_context"] for path in (run, imported)]
    assert len(curves[0]) > 4 and curves[0] == curves[1]
