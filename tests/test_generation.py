"""Sampling, and text that goes on past the trained length."""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, refused, run_program

from model import generation
from model.config import SCALING_KINDS, ModelConfig, RopeConfig, ScalingConfig
from model.generation import generate, sample_next
from model.positions import ENCODINGS
from model.transformer import Transformer
from scripts import generate as write

LOGITS = torch.log(torch.tensor([[0.1, 0.5, 0.05, 0.35]]))


def seeded(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def draws(count: int = 400, **settings: float) -> set[int]:
    return set(sample_next(LOGITS.expand(count, -1), seeded(count), **settings).tolist())


def test_temperature():
    assert draws(temperature=0.0) == {1}
    assert draws(temperature=1e-8) == {1}
    assert draws(temperature=1.0) == {0, 1, 2, 3}


@pytest.mark.parametrize("k, kept", [(0, {0, 1, 2, 3}), (1, {1}), (2, {1, 3}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3})])
def test_top_k(k: int, kept: set[int]):
    assert draws(top_k=k) == kept


@pytest.mark.parametrize(
    "p, kept", [(0.0, {1}), (1e-8, {1}), (0.4, {1}), (0.6, {1, 3}), (0.9, {0, 1, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_crossing_token_and_never_none(p: float, kept: set[int]):
    assert draws(top_p=p) == kept


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 1.1}, {"top_p": -0.1}]
)
def test_senseless_settings_are_refused(settings: dict):
    with pytest.raises(ValueError, match=next(iter(settings))):
        draws(**settings)


def test_frequencies_follow_the_probabilities():
    generators = [torch.Generator().manual_seed(0)] * 20_000
    counts = torch.bincount(sample_next(LOGITS.expand(20_000, -1), generators), minlength=4) / 20_000
    assert torch.allclose(counts, LOGITS.exp()[0], atol=0.015)


def model(position: str = "rope") -> Transformer:
    return Transformer(ModelConfig(dim=32, n_layers=2, n_heads=2, ffn_dim=64, position=position, init_std=0.2), 50)


TRAINED = 8
KINDS = [kind for kind in SCALING_KINDS if kind != "none"]


def variant(name: str) -> Transformer:
    """A model of an encoding, of a way of stretching RoPE, or with a window; grouped heads."""
    scaling = ScalingConfig(name, factor=3.0, trained_length=TRAINED) if name in KINDS else ScalingConfig()
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "init_std": 0.2}
    position, window = name if name in ENCODINGS else "rope", 6 if name == "window" else None
    return Transformer(ModelConfig(position=position, rope=RopeConfig(scaling=scaling), window=window, **shape), 50)


@torch.no_grad()
def uncached(m: Transformer, prompt: list[int], length: int) -> tuple[list[int], torch.Tensor]:
    """Greedy text up to `length` tokens, read anew for each, and the logits `(length - 1, vocab)` on the way."""
    x, logits = torch.tensor([prompt]), []
    for end in range(1, length):
        logits.append(m.eval()(x[:, :end])[0, -1])
        if end == x.shape[1]:
            x = torch.cat((x, logits[-1].argmax()[None, None]), dim=1)
    return x[0, len(prompt) :].tolist(), torch.stack(logits)


# The whole matrix for the encodings; a corner of it for the ways of stretching and the window, the rest slow.
MATRIX = [
    pytest.param(name, prefill, rows, marks=[] if name in ENCODINGS or quick else pytest.mark.slow)
    for name in (*ENCODINGS, *KINDS, "window")
    for prefill in (1, 5, 2 * TRAINED)
    for rows in ("one", "three", "unequal")
    for quick in [(prefill, rows) == (5, "unequal")]
]


@pytest.mark.parametrize(("name", "prefill", "rows"), MATRIX)
def test_greedy_text_equals_the_uncached_loop(name: str, prefill: int, rows: str):
    """Text and logits, in one step and in many, to three times the trained length; and A, then B, then A again."""
    m, longest = variant(name), 3 * TRAINED + 1
    draw = torch.Generator().manual_seed(1)
    lengths = {"one": [prefill], "three": [prefill] * 3, "unequal": [prefill, prefill + 4, prefill + 7]}[rows]
    prompts = [torch.randint(50, (length,), generator=draw).tolist() for length in lengths]
    seen: list[torch.Tensor] = []

    def watched(tokens: torch.Tensor, cache: generation.KVCache) -> torch.Tensor:
        seen.append(m.last_logits(tokens, cache))
        return seen[-1]

    first = list(generate(m, prompts, longest - prefill, temperature=0.0, forward=watched))
    for row, prompt in enumerate(prompts):
        text, logits = uncached(m, prompt, longest)
        made = [step[row] for step in first if step[row] is not None]
        assert made[: len(text)] == text and len(made) == longest - prefill
        gaps = [(there - here[row]).abs().max() for there, here in zip(logits[prefill - 1 :], seen, strict=False)]
        assert len(gaps) == longest - prefill and max(gaps) < 1e-4
    other = list(generate(m, [[3, 4]], 3, temperature=0.0))
    assert list(generate(m, prompts, longest - prefill, temperature=0.0)) == first
    one = list(generate(m, prompts, 1, temperature=0.0))
    assert one[0] == first[0] and list(generate(m, [[3, 4]], 3, temperature=0.0)) == other


@pytest.mark.parametrize("name", [*ENCODINGS, "dynamic", "window"])
def test_prompts_of_unequal_length_go_on_as_each_would_alone(name: str):
    m, prompts = variant(name), [[7], list(range(1, 6)), list(range(20, 29))]
    made = list(generate(m, prompts, 20, temperature=0.0))
    for row, prompt in enumerate(prompts):
        alone = [token for (token,) in generate(m, [prompt], 20, temperature=0.0)]
        assert [step[row] for step in made if step[row] is not None] == alone
    # The rest of a longer prompt is read without making anything.
    assert [step.index(None) if None in step else None for step in made[:9]] == [1, 1, 1, 1, 2, 2, 2, 2, None]


def test_a_sample_does_not_depend_on_the_others_beside_it():
    m = model()

    def texts(prompts: list[list[int]], seeds: list[int], **settings: object) -> list[list[int]]:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        made = list(generate(m, prompts, 30, generators=generators, **settings))
        return [[step[row] for step in made if step[row] is not None] for row in range(len(prompts))]

    alone = [texts([prompt], [seed])[0] for prompt, seed in (([1, 2], 0), ([1, 2], 1), ([4] * 7, 2))]
    assert alone == texts([[1, 2], [1, 2], [4] * 7], [0, 1, 2]) and alone[0] != alone[1]
    # A row that ends keeps still, and the others go on as before.
    end = next(token for token in alone[0][2:20] if token not in alone[1])
    cut = texts([[1, 2], [1, 2]], [0, 1], end_of_text=end)
    assert cut == [alone[0][: alone[0].index(end) + 1], alone[1]]
    assert len(list(generate(m, [[3], [3, 4]], 0))) == 0


def test_ids_that_only_pad_the_embedding_are_never_made():
    m = model()
    settings = {"generators": seeded(8), "temperature": 100.0}
    made = {token for step in generate(m, [[1]] * 8, 60, vocab_size=10, **settings) for token in step}
    assert made == set(range(10))


def test_seeds_decide_and_the_global_generator_is_untouched():
    m = model()

    def text(seed: int) -> list[int]:
        return [t for (t,) in generate(m, [[1, 2]], 20, generators=[torch.Generator().manual_seed(seed)])]

    state = torch.get_rng_state()
    assert text(0) == text(0) != text(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_generation_restores_training_mode_and_ends():
    m = model().train()
    end = next(t for (t,) in generate(m, [[3]], 1, temperature=0.0))
    assert m.training
    assert len(list(generate(m, [[3]], 30, temperature=0.0, end_of_text=end))) == 1
    assert list(generate(m, [[3]], 0)) == []
    with pytest.raises(ValueError, match="prompt holds no token"):
        list(generate(m, [[1], []], 3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text_folder):
    folder = tmp_path_factory.mktemp("generate")
    done = run_program(
        "train.py", "--config=tiny.yaml", "--data.source=files", f"--data.path={text_folder}", "--data.limit=null",
        "--data.vocab_size=300", f"--data.cache_dir={folder / 'cache'}", f"--out_dir={folder}", "--train.steps=5",
        "--train.warmup_steps=1", "--eval.length_targets=16", "--tracking.mode=disabled",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "tiny-rope"


def test_program_writes_the_prompt_and_goes_on(run):
    done = run_program(
        "scripts/generate.py", run, "--prompt", "ünder 🙂", "--max_new_tokens", 100, "--temperature", "0"
    )
    assert done.returncode == 0 and done.stdout.startswith("ünder 🙂") and len(done.stdout) > 20
    assert "trained on 32 and goes on past them" in done.stderr and done.stderr.count("\n") == 1
    again = run_program(
        "-m", "scripts.generate", run, "--prompt", "ünder 🙂", "--max_new_tokens", 100, "--temperature", "0"
    )
    assert again.stdout == done.stdout
    one = run_program("scripts/generate.py", run / "checkpoints/step-0000005", "--max_new_tokens=4", "--seed=3")
    assert one.returncode == 0 and one.stderr == ""


def test_program_stretches_rope(run, capsys: pytest.CaptureFixture):
    arguments, texts = [str(run), "--prompt=the rope", "--max_new_tokens=80", "--temperature=1"], set()
    for kind in (None, "linear", "ntk", "dynamic", "yarn", "llama3"):
        stretched = [f"--model.rope.scaling.kind={kind}", "--model.rope.scaling.factor=4"] if kind else []
        write.main([*arguments, *stretched])
        texts.add(capsys.readouterr().out)
    assert len(texts) == 6 and all(text.startswith("the rope") for text in texts)


def test_only_what_passes_the_trained_length_is_noted(run, capsys: pytest.CaptureFixture):
    """A prompt of 31, 32 or 33 tokens, and of three trained lengths; nothing is cut, and no new token need be made."""
    letters = [chr(ord("A") + n % 2) for n in range(96)]  # no merge of capitals was learnt: a token each
    for tokens in (31, 32, 33, 96):
        prompt = "".join(letters[:tokens])
        write.main([str(run), f"--prompt={prompt}", "--max_new_tokens=0"])
        said = capsys.readouterr()
        assert said.out == prompt + "\n"
        assert said.err.startswith(f"note: prompt and text may reach {tokens} tokens") == (tokens > 32)
        assert (said.err == "") == (tokens <= 32)


def allocations(work: Callable[[], object], folder: Path) -> tuple[list[int], int]:
    """Every piece of memory that torch takes during `work`, also inside its operations, and the most at once, in bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    memory = [event["args"] for event in sorted(events, key=lambda e: e.get("ts", 0)) if event["name"] == "[memory]"]
    before = memory[0]["Total Allocated"] - memory[0]["Bytes"]
    return [event["Bytes"] for event in memory], max(event["Total Allocated"] for event in memory) - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_is_sized_to_the_request(dtype: torch.dtype, tmp_path: Path):
    """What is really allocated: the keys and values of every layer, ids and positions, and next to nothing else."""
    layers, batch, kv_heads, prompt, new, head_dim = 3, 2, 2, 5, 3000, 8
    m = Transformer(ModelConfig(dim=32, n_layers=layers, n_heads=4, n_kv_heads=kv_heads, ffn_dim=64), 50).to(dtype)
    steps = generate(m, [[1] * prompt] * batch, new, temperature=0.0)
    pieces, peak = allocations(lambda: [next(steps) for _ in range(3)], tmp_path)
    formula = 2 * layers * batch * kv_heads * (prompt + new) * head_dim * dtype.itemsize
    layer, ids = formula // (2 * layers), batch * (prompt + new) * 8
    assert sorted(pieces)[-2 - 2 * layers :] == [ids] * 2 + [layer] * 2 * layers
    assert max(piece for piece in pieces if piece not in (ids, layer)) < 10_000
    # Small things that lie about take the rest: no second copy of as much as one layer's keys.
    assert 0 <= peak - formula - 2 * ids < layer


@pytest.mark.parametrize("name", [*ENCODINGS, "yarn", "window"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_decoded_token_copies_no_cache_and_makes_no_mask(name: str, kv_heads: int, tmp_path: Path):
    m, batch, keys = variant(name), 2, 4000
    m = Transformer(replace(m.config, n_kv_heads=kv_heads), 50)
    steps = generate(m, [[1] * keys] * batch, 9, temperature=0.0)
    next(steps)
    pieces, _ = allocations(lambda: [next(steps) for _ in range(3)], tmp_path)
    assert max(pieces) < batch * kv_heads * keys * m.config.head_dim * 4
    # Nothing has a byte for each key, but for the biases of ALiBi and the mask of a window.
    assert (max(pieces) < keys) == (name not in ("alibi", "window"))


def test_program_makes_samples_of_many_prompts_and_json(run, tmp_path: Path):
    (tmp_path / "prompts").write_text("the rope\n\nünder 🙂 the cable\nthe rope\n", encoding="utf-8")
    common = ["scripts/generate.py", run, "--max_new_tokens=12", "--seed=5"]
    done = run_program(*common, f"--prompts_file={tmp_path / 'prompts'}", "--samples=2", "--json")
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(t["prompt"], t["sample"], t["seed"]) for t in texts] == [
        (prompt, sample, 5 + sample)
        for prompt in ("the rope", "", "ünder 🙂 the cable", "the rope")
        for sample in (0, 1)
    ]
    assert all((t["tokens"] == 12 and t["finish"] == "length") or t["finish"] == "end_of_text" for t in texts)
    assert texts[0] == {**texts[6]} and texts[0]["text"] != texts[1]["text"]
    for prompt, text in (("the rope", texts[0]), ("ünder 🙂 the cable", texts[4])):
        one = run_program(*common, f"--prompt={prompt}")
        assert one.stdout == f"{prompt}{text['text']}\n"
    plain = run_program(*common, f"--prompt_file={tmp_path / 'prompts'}", "--samples=2")
    assert plain.stdout.startswith("--- prompt 1, sample 1\nthe rope\n\nünder")


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes that break")
def test_output_to_a_reader_that_stops_ends_without_a_word(run):
    command = f"{sys.executable} {ROOT / 'scripts/generate.py'} {run} --max_new_tokens=3000 | head -c 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert len(done.stdout) == 5 and done.stderr.startswith("note: ") and done.stderr.count("\n") == 1


def test_the_note_comes_once_and_before_the_text(run):
    command = [sys.executable, ROOT / "scripts/generate.py", run, "--interactive", "--max_new_tokens=40"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, input="the rope\nthe rope\n", **both)
    assert done.returncode == 0 and done.stdout.count("note: ") == 1
    assert done.stdout.index("\nthe rope") > done.stdout.index("note: ")


def test_help_says_what_a_run_is(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="0"):
        write.main(["--help"])
    assert "A run folder, whose newest checkpoint is taken" in capsys.readouterr().out


def test_program_reads_standard_input(run):
    command = [sys.executable, ROOT / "scripts/generate.py", run, "--max_new_tokens=3"]
    done = subprocess.run([*command, "--prompt_file=-"], input="the\nrope", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("the\nrope")
    bad = subprocess.run([*command, "--prompt_file=-"], input=b"\xff\xfe", capture_output=True)
    assert bad.returncode == 2 and b"- is not UTF-8 text" in bad.stderr and bad.stderr.count(b"\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_interactive_mode_edits_lines_stops_answers_and_ends(run):
    """In a terminal: Ctrl-A edits the line, Ctrl-C stops an endless answer, Ctrl-D ends the program."""
    import pty

    def as_a_terminal_does() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background have it ignored
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, ROOT / "scripts/generate.py", run, "--interactive", "--max_new_tokens=100000"],
        stdin=other, stdout=other, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=as_a_terminal_does,
    )  # fmt: skip
    os.close(other)
    shown = ""

    def until(words: str, seconds: float = 60) -> bool:
        nonlocal shown
        deadline = time.monotonic() + seconds
        while words not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 4096).decode(errors="replace")
        return words in shown

    def interrupt() -> bool:
        nonlocal shown
        shown = ""
        os.write(terminal, b"\x03")
        return until("\n> ")

    assert until("> ")
    os.write(terminal, b"rope\x01the \n")
    assert until("\nthe rope")
    assert interrupt()
    shown = ""
    os.write(terminal, b"walks\n")
    assert until("\nwalks")
    assert interrupt()
    os.write(terminal, b"\x04")
    assert process.wait(timeout=30) == 0
    assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("prompt", ["", "\n", "🙂", "the rope " * 60])
def test_program_takes_any_prompt(run, prompt: str):
    done = run_program("scripts/generate.py", run, f"--prompt={prompt}", "--max_new_tokens=5")
    assert done.returncode == 0 and done.stdout.startswith(prompt)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], "nowhere does not exist"),
        (["configs"], "configs holds no checkpoint"),
        (["RUN", "--top_p=1.5"], "top_p is 1.5"),
        (["RUN", "--temperature=-1"], "temperature is -1"),
        (["RUN", "--max_new_tokens=-1"], "max_new_tokens is -1"),
        (["RUN", "--samples=0"], "samples is 0"),
        (["RUN", "--prompt=a", "--interactive"], "prompt and interactive are given"),
        (["RUN", "--prompt_file=nowhere.txt"], "nowhere.txt cannot be read (No such file"),
        (["RUN", "--prompts_file=configs"], "configs cannot be read (Is a directory)"),
        (["RUN", "--model.window=0"], "model.window is 0"),
        (["RUN", "--device=gpu"], "device is 'gpu'"),
        (["RUN", "--temprature=1"], "did you mean --temperature?"),
        ([], "required: run"),
        (["RUN", "--model.rope.scaling.kind=yarn"], "stretches nothing with model.rope.scaling.factor 1"),
        (["RUN", "--model.rope.scaling.kind=dinamic"], "choose one of none, linear"),
        (["RUN", "--model.rope.scaling.factor=0.5"], "give 1 or more"),
    ],
)
def test_program_refuses_in_one_line(run, arguments: list[str], words: str, capsys: pytest.CaptureFixture):
    assert words in refused(write.main, [run if a == "RUN" else a for a in arguments], capsys)


def test_another_tokenizer_is_refused(run, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"use_regex":true', '"use_regex":false'))
    done = run_program("scripts/generate.py", copy)
    assert done.returncode == 2 and "is not the tokenizer that" in done.stderr
