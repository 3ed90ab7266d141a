"""Preparation of more data than fits into one shard: killed and gone on with, in little memory, at the tokenizer's speed."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, run_program
from test_data import files, quiet
from test_data_faults import names

import data.prepare
from data.config import DataConfig
from data.corpus import open_corpus
from data.prepare import prepare
from data.tokenizer import train_tokenizer
from scripts.benchmark import write_text

# scripts/prepare_data.py with shards of argv[1] ids; on opening the file argv[2] it tells us and waits to be killed.
# At the end it says how much memory it took.
DRIVER = """
import os, re, sys
import data.prepare
from scripts.prepare_data import main
data.prepare.SHARD_TOKENS = int(sys.argv[1])
def hook(event, args):
    if event == "open" and str(args[0]).endswith(sys.argv[2]):
        print("here", flush=True)
        sys.stdin.read()
sys.addaudithook(hook)
main(sys.argv[3:])
if os.path.exists("/proc/self/status"):  # ru_maxrss would count what our own process had when it made this one
    print("peak MiB", int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


def start(shard_tokens: int, place: str, arguments: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, str(shard_tokens), place, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(shard_tokens: int, arguments: list[str]) -> str:
    process = start(shard_tokens, "nowhere", arguments)
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output
    return output


def kill_at(place: str, shard_tokens: int, arguments: list[str]) -> None:
    process = start(shard_tokens, place, arguments)
    assert "here\n" in iter(process.stdout.readline, "")
    process.kill()
    process.communicate()


def finished(cache: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the shards that a killed preparation has finished, and of its tokenizer."""
    (building,) = (path for path in cache.iterdir() if path.is_dir())
    assert building.name.startswith(".")
    shards = [json.loads(line)["shard"] for line in (building / "finished.jsonl").read_text().splitlines()]
    return {name: identity(building / name) for name in ["tokenizer.json", *shards]}


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def entry(cache: Path) -> Path:
    (made,) = cache.iterdir()
    assert not made.name.startswith(".")
    return made


def same_bytes(one: Path, two: Path) -> None:
    """Two entries of the same settings but for the place of the cache."""
    assert names(one) == names(two)
    for name in names(one) - {"manifest.json"}:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (one, two)]
    for manifest in manifests:
        manifest["settings"].pop("cache_dir")
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("trained", [True, False], ids=["own tokenizer", "pretrained"])
def test_killed_twice_it_goes_on_after_the_finished_shards(trained: bool, texts: list[str], tmp_path: Path):
    rows = [text[part : part + 500] for text in texts for part in range(0, len(text), 500)]
    rows[3:3] = ["", " ", "\n"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    arguments = ["--data.source=files", f"--data.path={tmp_path / 'rows.jsonl'}", "--data.vocab_size=300"]
    arguments.append("--data.val_fraction=0.3")
    if not trained:
        train_tokenizer(texts[:3], 400).save(str(tmp_path / "own.json"))
        arguments.append(f"--data.tokenizer={tmp_path / 'own.json'}")
    killed = [*arguments, f"--data.cache_dir={tmp_path / 'killed'}"]

    kill_at("train-00003.bin", 600, killed)
    first = finished(tmp_path / "killed")
    assert {"train-00002.bin", "tokenizer.json"} < first.keys() and "train-00003.bin" not in first
    # What a kill in the middle of a record leaves.
    (building,) = (path for path in (tmp_path / "killed").iterdir() if path.is_dir())
    with (building / "finished.jsonl").open("a") as file:
        file.write('{"split": "train", "sha')
    kill_at("train-00006.bin", 600, killed)
    second = finished(tmp_path / "killed")
    assert first.items() < second.items() and "train-00005.bin" in second
    lines = (building / "finished.jsonl").read_text().splitlines()
    output = finish(600, killed)
    made = entry(tmp_path / "killed")
    assert f"going on after {len(second) - 1} finished shards\n" in output and str(made) in output
    assert {name: identity(made / name) for name in second} == second

    whole = finish(600, [*arguments, f"--data.cache_dir={tmp_path / 'whole'}"])
    same_bytes(made, entry(tmp_path / "whole"))
    manifest = json.loads((made / "manifest.json").read_text())
    assert len(manifest["train"]["shards"]) > 7 and len(manifest["val"]["shards"]) > 1
    # Only what the last start has encoded counts for its speed.
    done, all_of_it = (int(re.search(r"encoded (\d+) documents", text)[1]) for text in (output, whole))
    assert all_of_it == len(rows) - 1 == manifest["train"]["documents"] + manifest["val"]["documents"]
    assert done == all_of_it - sum(json.loads(line)["documents"] for line in lines)


def test_no_shard_is_lost_where_there_was_no_room(texts: list[str], tmp_path: Path):
    """A limit on file sizes stands for a full disk: the first shard of seven kilobytes fits, the bar is at the second."""
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02d}.txt").write_text(text * (1 + 3 * (number > 5)), encoding="utf-8")
    cache = tmp_path / "cache"
    arguments = ["--data.source=files", f"--data.path={tmp_path}/*.txt", f"--data.cache_dir={cache}"]
    arguments += ["--data.vocab_size=257", "--data.val_fraction=0.1"]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    command = [sys.executable, "-c", DRIVER, "3000", "nowhere", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "make room" in done.stderr, done.stderr
    before = finished(cache)
    assert len(before) > 1
    finish(3000, arguments)
    assert {name: identity(entry(cache) / name) for name in before} == before


@pytest.mark.parametrize(
    "command", [["scripts/prepare_data.py"], ["-m", "scripts.prepare_data"]], ids=["file", "module"]
)
def test_the_program_says_what_it_made_and_training_finds_it(
    command: list[str], small_run: list[str], text_folder: Path, tmp_path: Path
):
    settings = [*small_run, f"--data.cache_dir={tmp_path / 'cache'}"]
    done = run_program(*command, *settings)
    assert (done.returncode, done.stderr) == (0, "")
    made = entry(tmp_path / "cache")
    size = sum(path.stat().st_size for path in text_folder.iterdir())
    assert f"preparing files data in {made}\n" in done.stdout and done.stdout.endswith(f"every byte checked: {made}\n")
    rates = re.search(rf"encoded 12 documents, {size:,} bytes in \S+ s: (\S+) documents/s, (\S+) MB/s\n", done.stdout)
    assert all(float(rate.replace(",", "")) > 0 for rate in rates.groups())
    again = run_program(*command, *settings)
    assert again.returncode == 0 and "preparing" not in again.stdout and "encoded" not in again.stdout
    assert prepare(files(text_folder, tmp_path / "cache", val_fraction=0.25), pytest.fail).folder == made
    bad = run_program(*command, *settings, "--data.path=/nowhere")
    assert bad.returncode == 2 and bad.stderr == "prepare_data.py: error: data.path /nowhere matches no file\n"


def test_of_a_large_entry_the_sizes_are_checked_at_every_start_and_the_rest_by_the_program(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = files(text_folder, tmp_path)
    folder = prepare(config, quiet).folder
    shard = folder / "val-00000.bin"
    monkeypatch.setattr(data.prepare, "CHECKED_BYTES", sum(p.stat().st_size for p in folder.glob("[!mv]*")))
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    prepare(config, quiet)  # too large to look at all of it
    with pytest.raises(ValueError, match=r"val-00000\.bin is not as it was written"):
        prepare(config, quiet, check_all=True)
    shard.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"val-00000\.bin is not as it was written"):
        prepare(config, quiet)


def test_one_long_text_is_encoded_in_pieces(texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data.tokenizer.PIECE", 100)
    monkeypatch.setattr(data.prepare, "BATCH_CHARACTERS", 3500)
    (tmp_path / "t").mkdir()
    for number in range(3):
        (tmp_path / "t" / f"{number}.txt").write_text(" ".join(texts[number:]), encoding="utf-8")
    cut = prepare(files(tmp_path / "t", tmp_path / "cut"), quiet).folder
    monkeypatch.undo()
    same_bytes(cut, prepare(files(tmp_path / "t", tmp_path / "whole"), quiet).folder)


# --- 200 MB

# What `tokenizers` alone takes for the texts of a file of JSON lines, batch by batch, the results thrown away.
ALONE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
texts, seconds, size = [], 0, 0
for line in [*open(sys.argv[1]), None]:
    if line:
        texts.append(json.loads(line)["text"])
    if not line or sum(map(len, texts)) > 4_000_000:
        size += sum(len(text.encode()) for text in texts)
        started = time.perf_counter()
        tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        seconds += time.perf_counter() - started
        texts = []
print(size, seconds)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the most memory a process had is read from /proc")
def test_200_megabytes_at_the_tokenizers_speed_in_a_gibibyte_and_killed_twice(tmp_path: Path):
    """Speeds are compared in short turns, the best with the best, since other work on the machine disturbs both."""
    write_text(tmp_path / "rows.jsonl", 200e6)
    write_text(tmp_path / "few.jsonl", 20e6)
    speeches = (document.text for document in open_corpus(DataConfig()))
    train_tokenizer(speeches, 2048).save(str(tmp_path / "pretrained.json"))
    tokenizer = f"--data.tokenizer={tmp_path / 'pretrained.json'}"

    def arguments(name: str, cache: str) -> list[str]:
        return ["--data.source=files", f"--data.path={tmp_path / name}", f"--data.cache_dir={tmp_path / cache}"]

    ours, theirs = [], []
    for turn in range(8):
        done = run_program("-c", ALONE, tmp_path / "few.jsonl", tmp_path / "pretrained.json")
        few_size, seconds = map(float, done.stdout.split())
        theirs.append(few_size / seconds / 1e6)
        output = finish(2**24, [*arguments("few.jsonl", f"few-{turn}"), tokenizer])
        ours.append(float(re.search(r"(\S+) MB/s", output)[1]))
        print(f"tokenizers {theirs[-1]:.2f} MB/s, ours {ours[-1]:.2f} MB/s, load {os.getloadavg()[0]:.1f}", flush=True)

    big = [*arguments("rows.jsonl", "big"), "--data.vocab_size=2048"]
    started = time.perf_counter()
    kill_at("train-00001.bin", 2**24, big)
    first = finished(tmp_path / "big")
    kill_at("train-00002.bin", 2**24, big)
    second = finished(tmp_path / "big")
    output = finish(2**24, big)
    made = entry(tmp_path / "big")
    print(output, f"{time.perf_counter() - started:.0f} s in all")
    assert {"tokenizer.json", "train-00000.bin"} <= first.keys() and first.items() < second.items()
    assert {name: identity(made / name) for name in second} == second
    output = finish(2**24, [*arguments("rows.jsonl", "whole"), "--data.vocab_size=2048"])
    print(output)
    same_bytes(made, entry(tmp_path / "whole"))
    assert int(re.search(r"([0-9,]+) bytes in", output)[1].replace(",", "")) >= 200e6
    assert float(output.split()[-1]) <= 1024
    ratio = max(ours) / max(theirs)
    print(f"ratio of the best {ratio:.3f}, of each turn {[round(a / b, 3) for a, b in zip(ours, theirs, strict=True)]}")
    assert ratio >= 0.9
