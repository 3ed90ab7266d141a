"""What is wrong with the data is said in one line, with exit code 2, and leaves nothing half done on disk."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run_program
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import train
from data.config import DataConfig
from data.corpus import group_rank
from data.prepare import PreparedData, prepare
from data.tokenizer import END_OF_TEXT, byte_lengths, end_of_text_id, train_tokenizer
from scripts import evaluate, generate


def quiet(_: str) -> None:
    pass


def files(path: Path, cache: Path, **changes: object) -> DataConfig:
    return DataConfig(**{"source": "files", "path": str(path), "cache_dir": str(cache), "vocab_size": 300, **changes})


def refused(main: Callable[[list[str]], None], arguments: list[object], capsys: pytest.CaptureFixture) -> str:
    """The one line with which a program refuses, exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2, error
    assert error.count("\n") == 1 and error.endswith("\n"), error
    return error


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


# --- files that are not text

NO_TEXT = {
    "empty.txt": (b"", "the training text has 0 tokens, and one window of data.context 32 needs 33"),
    "latin1.txt": (b"caf\xe9\n", "latin1.txt is not UTF-8 at byte 3: convert it"),
    "utf16.txt": ("the rope".encode("utf-16"), "utf16.txt is not UTF-8 at byte 0"),
    "empty.jsonl": (b"", "empty.jsonl holds no document"),
    "blank.jsonl": (b"\n \n", "blank.jsonl holds no document"),
    "torn.jsonl": (b'{"text": "a"}\n{"text": ', "torn.jsonl, row 1: cannot be read (Expecting value"),
    "latin1.jsonl": (b'{"text": "caf\xe9"}\n', "latin1.jsonl, row 0: cannot be read ('utf-8' codec can't decode"),
    "half.jsonl": (b'{"text": "a\\ud83d b"}', "half.jsonl, row 0: cannot be read ('utf-8' codec can't encode"),
    "column.jsonl": (b'{"text": "a"}\n{"story": "b", "n": 1}', "column.jsonl, row 1: no text in column 'text'; its"),
    "number.jsonl": (b'{"text": 3}\n', "number.jsonl, row 0: no text in column 'text'; its columns are text"),
    "null.json": (b"null", "null.json, row 0: no text in column 'text'; it is 'None'"),
    "torn.json": (b'[{"text": "a"},\n', "torn.json, row 0: cannot be read (Expecting value: line 2"),
    "empty.parquet": (b"", "empty.parquet cannot be loaded (Parquet file size is 0 bytes)"),
    "torn.parquet": (b"PAR1 and no more", "torn.parquet cannot be loaded ("),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_not_text_is_named_with_its_place(
    name: str, small_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
):
    content, words = NO_TEXT[name]
    path, cache = tmp_path / name, tmp_path / "cache"
    path.write_bytes(content)
    error = refused(train.main, [*small_run, f"--data.path={path}", f"--data.cache_dir={cache}"], capsys)
    assert words in error
    # An empty text makes a whole entry that holds nothing; of all others nothing is left. No run is begun.
    assert len(names(cache)) == (name == "empty.txt") and not any(n.startswith(".") for n in names(cache))
    assert not (tmp_path / "runs").exists() and path.read_bytes() == content


def test_json_lines_and_a_json_array_are_read_alike(tmp_path: Path):
    texts = ["a\r\nb\u2028c", "", "\x00 " + END_OF_TEXT, "🙂" * 40, "the rope"]
    rows = [{"n": number, "text": text} for number, text in enumerate(texts)]
    made = []
    for name, content in {
        "escaped.jsonl": "\n".join(map(json.dumps, rows)),
        "plain.jsonl": "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in rows),
        "array.json": json.dumps(rows, indent=1),
    }.items():
        (tmp_path / name).write_bytes(content.encode())
        made.append([document.text for document in files_corpus(tmp_path / name)])
    assert made == [texts] * 3


def files_corpus(path: Path):
    from data.corpus import open_corpus

    return open_corpus(files(path, path.parent))


# --- how much text there is


def byte_tokenizer(path: Path, size: int = 257, last: str = "z") -> Path:
    """A tokenizer.json of one id a byte, in which the letter `last` has the id `size - 1`; written to `path`.

    Ids between the bytes and `last` are filled with entries that no text gives.
    """
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {last})
    entries = [END_OF_TEXT, *alphabet, *(f"unused{n}" for n in range(size - 257)), last]
    tokenizer = Tokenizer(models.BPE(dict(zip(entries, range(size), strict=True)), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("split", ["training", "validation"])
@pytest.mark.parametrize("tokens", [31, 32, 33])
def test_one_window_needs_one_token_more_than_the_context(
    split: str, tokens: int, small_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
):
    folder = tmp_path / "t"
    folder.mkdir()
    held_out = min(("a.txt", "b.txt"), key=lambda name: group_rank(name, 0))
    for name in ("a.txt", "b.txt"):
        short = (name == held_out) == (split == "validation")
        # One id a byte, and the end-of-text that is put after each document.
        (folder / name).write_text("z" * (tokens - 1 if short else 500))
    arguments = [
        *small_run, f"--data.path={folder}", f"--data.cache_dir={tmp_path / 'cache'}", "--train.steps=1",
        "--train.warmup_steps=1", f"--data.tokenizer={byte_tokenizer(tmp_path / 'bytes.json')}",
    ]  # fmt: skip
    if tokens < 33:
        error = refused(train.main, arguments, capsys)
        assert f"the {split} text has {tokens} tokens, and one window of data.context 32 needs 33: use more" in error
        assert not (tmp_path / "runs").exists()
        return
    train.main(arguments)
    points = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert points[0]["train/loss"] > 0 and points[-1]["val/loss"] > 0
    lengths = json.loads((tmp_path / "runs/run/lengths.json").read_text())
    # What is too long for the only held-out document is said, not measured on something else.
    assert (16 in [row["context"] for row in lengths["by_context"]]) and (
        (32 in lengths["skipped_contexts"]) == (split == "validation")
    )


def test_no_byte_is_lost_or_taken_for_an_end(tmp_path: Path):
    texts = [
        "a\x00b\x00", "one\r\ntwo\rthree\n", f"{END_OF_TEXT}quoted{END_OF_TEXT}", "\ufeffmarked", "\u2028\u0085\x1c\x0b",
        "</s><|end_of_text|><eos>", "\ufffd\uffff\U0010ffff", " ", "\n",
    ]  # fmt: skip
    (tmp_path / "t").mkdir()
    for number, text in enumerate([*texts, ""]):
        (tmp_path / "t" / f"{number}.txt").write_bytes(text.encode())
    data = prepare(files(tmp_path / "t", tmp_path / "cache"), quiet)
    lengths, end, found = byte_lengths(data.tokenizer), end_of_text_id(data.tokenizer), []
    for split in ("train", "val"):
        tokens, starts = data.tokens(split), data.document_starts(split)
        ids = tokens.read(0, len(tokens))
        assert np.flatnonzero(ids == end).tolist() == (starts[1:] - 1).tolist()
        assert lengths[ids].sum() == data.manifest[split]["bytes"]
        found += [
            data.tokenizer.decode(ids[start : stop - 1].tolist())
            for start, stop in np.stack((starts[:-1], starts[1:]), 1)
        ]
    # An empty file is a document without text: there is nothing of it to learn, and nothing of it is kept.
    assert sorted(found) == sorted(texts)


# --- vocabularies


@pytest.mark.parametrize(
    "size, dtype", [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (70_000, "uint32")]
)
def test_the_last_id_of_a_vocabulary_is_kept(size: int, dtype: str, tmp_path: Path):
    tokenizer = byte_tokenizer(tmp_path / "big.json", size)
    (tmp_path / "a.txt").write_text("azaz" * 50)
    data = prepare(files(tmp_path / "a.txt", tmp_path / "cache", tokenizer=str(tokenizer)), quiet)
    ids = data.tokens("train").read(0, 180)
    assert data.manifest["dtype"] == dtype and data.manifest["vocab_size"] == size
    assert set(ids[1::2]) == {size - 1} and data.tokenizer.decode(ids.tolist()) == "azaz" * 45
    assert data.tokenizer.decode(data.tokens("val").read(0, 20).tolist()) == "azaz" * 5


def test_a_vocabulary_with_unused_ids_has_the_size_of_its_largest(small_run: list[str], tmp_path: Path):
    """70,000 ids of which 257 exist: counting the entries would give uint16, too small a model, and wrong ids."""
    path = byte_tokenizer(tmp_path / "holes.json", 70_000)
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {k: v for k, v in content["model"]["vocab"].items() if not k.startswith("unused")}
    path.write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("azaz" * 500)
    train.main(
        [*small_run, f"--data.path={tmp_path / 'a.txt'}", f"--data.tokenizer={path}", "--train.steps=1",
         "--train.warmup_steps=1", f"--data.cache_dir={tmp_path / 'cache'}", "--eval.windows=2",
         "--eval.length_targets=8", "--eval.length_ratios=[1]", "--eval.sample_tokens=2"]
    )  # fmt: skip
    (entry,) = (tmp_path / "cache").iterdir()
    manifest = json.loads((entry / "manifest.json").read_text())
    assert (manifest["vocab_size"], manifest["dtype"]) == (70_000, "uint32")
    state = json.loads((tmp_path / "runs/run/checkpoints/step-0000001/state.json").read_text())
    assert state["vocab_size"] == 70_000


# --- a cache entry that is not as it was made


@pytest.fixture(scope="module")
def entry(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepare(files(text_folder, tmp_path_factory.mktemp("entry"), val_fraction=0.25), quiet)


@pytest.fixture(scope="module")
def other_entry(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """The same text under another tokenizer of the same size."""
    folder = tmp_path_factory.mktemp("other")
    train_tokenizer(["hemp and cable " * 50], 300).save(str(folder / "own.json"))
    return prepare(files(text_folder, folder, val_fraction=0.25, tokenizer=str(folder / "own.json")), quiet)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# What is done to the folder of an entry, given that of another, and what is said of it.
DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "shard cut": (lambda a, b: (a / "train-00000.bin").write_bytes((b / "train-00000.bin").read_bytes()[:100]), "train-00000.bin is not as it was written"),
    "shard cut to nothing": (lambda a, b: (a / "val-00000.bin").write_bytes(b""), "val-00000.bin is not as it was written"),
    "one bit": (lambda a, b: flip(a / "train-00000.bin"), "train-00000.bin is not as it was written"),
    "shard gone": (lambda a, b: (a / "val-00000.bin").unlink(), "is damaged ([Errno 2]"),
    "shards of another tokenizer": (lambda a, b: shutil.copy(b / "train-00000.bin", a), "train-00000.bin is not as it was written"),
    "another tokenizer": (lambda a, b: shutil.copy(b / "tokenizer.json", a), "tokenizer.json is not as it was written"),
    "offsets": (lambda a, b: flip(a / "val-starts.npy"), "val-starts.npy is not as it was written"),
    "manifest cut": (lambda a, b: (a / "manifest.json").write_bytes((a / "manifest.json").read_bytes()[:100]), "is damaged ("),
    "manifest not text": (lambda a, b: (a / "manifest.json").write_bytes(b"\xff\xfe"), "is damaged ("),
    "manifest null": (lambda a, b: (a / "manifest.json").write_text("null"), "is damaged ("),
    "manifest gone": (lambda a, b: (a / "manifest.json").unlink(), "is damaged ([Errno 2]"),
    "another entry under this name": (lambda a, b: shutil.copytree(b, a, dirs_exist_ok=True), "was made from other data or settings"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_refused_named_and_made_anew(
    name: str, entry: PreparedData, other_entry: PreparedData, text_folder: Path, tmp_path: Path
):
    damage, words = DAMAGE[name]
    folder = tmp_path / entry.folder.name
    shutil.copytree(entry.folder, folder)
    config = files(text_folder, tmp_path, val_fraction=0.25)
    assert prepare(config, quiet).folder == folder
    damage(folder, other_entry.folder)
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError) as refusal:
        prepare(config, quiet)
    assert words in str(refusal.value) and str(refusal.value).endswith(f": delete {folder} and run again")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == left and names(tmp_path) == {folder.name}
    # The remedy works: the same settings give the same bytes again.
    shutil.rmtree(folder)
    prepare(config, quiet)
    assert (folder / "train-00000.bin").read_bytes() == (entry.folder / "train-00000.bin").read_bytes()


def test_a_damaged_entry_stops_training_before_it_begins(
    small_run: list[str], entry: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture
):
    folder = tmp_path / "cache" / entry.folder.name
    shutil.copytree(entry.folder, folder)
    flip(folder / "train-00000.bin")
    error = refused(train.main, [*small_run, f"--data.cache_dir={folder.parent}"], capsys)
    assert f"{folder}/train-00000.bin is not as it was written: delete {folder} and run again" in error
    assert not (tmp_path / "runs").exists()


# --- several preparations, and killed ones


# Prepares argv[1] in the cache argv[2]. On opening a file whose name ends with argv[3], on the rename, or on saying
# that there is no such entry yet, it tells us and waits for a line.
STOPPED = """
import os, sys
from data.config import DataConfig
from data.prepare import prepare
_, path, cache, place = sys.argv
def hook(event, args):
    global place
    if event == place or event == "open" and str(args[0]).endswith(place):
        place = "nowhere else"
        print("here", flush=True)
        sys.stdin.readline()
sys.addaudithook(hook)
config = DataConfig(source="files", path=path, cache_dir=cache, vocab_size=300)
print(prepare(config, lambda _: sys.audit("say")).folder)
"""


def stopped(text_folder: Path, cache: Path, *places: str) -> list[subprocess.Popen]:
    """Processes that prepare the same data, each waiting at a place of the way."""
    command = [sys.executable, "-c", STOPPED, str(text_folder), str(cache)]
    made = [
        subprocess.Popen([*command, place], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for place in places
    ]
    assert [process.stdout.readline() for process in made] == ["here\n"] * len(made)
    return made


def test_two_preparations_at_once_agree(text_folder: Path, tmp_path: Path):
    # Each has found that there is no entry before either begins to make one.
    both = stopped(text_folder, tmp_path, "say", "say")
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    found = [process.communicate(timeout=60)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    made = prepare(files(text_folder, tmp_path), pytest.fail).folder
    assert found == [str(made)] * 2 and names(tmp_path) == {made.name}


def test_what_a_killed_preparation_left_is_gone_on_with_and_a_living_one_is_waited_for(
    text_folder: Path, tmp_path: Path
):
    for place in ("tokenizer.json.tmp", "train-00000.bin", "val-00000.bin", "manifest.json.tmp", "os.rename"):
        (process,) = stopped(text_folder, tmp_path, place)
        process.kill()
        process.communicate()
        (name,) = {name.removesuffix(".lock") for name in names(tmp_path)}
        assert name.startswith(".files-")
    (living,) = stopped(text_folder, tmp_path, "manifest.json.tmp")
    half_built = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    # One more preparation of the same data says that it waits, and takes what the living one makes.
    (waiting,) = stopped(text_folder, tmp_path, "say")
    waiting.stdin.write("\n")
    waiting.stdin.flush()
    # Another one in the same cache goes its own way.
    other = prepare(files(text_folder, tmp_path, vocab_size=310), quiet).folder
    assert names(tmp_path) == {name, f"{name}.lock", other.name}
    assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == half_built
    assert waiting.poll() is None
    found = {process.communicate("\n", timeout=60)[0].split()[-1] for process in (living, waiting)}
    made = prepare(files(text_folder, tmp_path), pytest.fail).folder
    assert found == {str(made)} and names(tmp_path) == {other.name, made.name}
    unbroken = prepare(files(text_folder, tmp_path / "unbroken"), quiet).folder
    assert names(made) == names(unbroken) == {*half_built, "manifest.json"} - SCAFFOLD
    assert all((made / n).read_bytes() == (unbroken / n).read_bytes() for n in names(made) - {"manifest.json"})


# What a half-built entry has besides; the manifest is still under another name where the test looks.
SCAFFOLD = {"finished.jsonl", "train-lengths.bin", "val-lengths.bin", "manifest.json.tmp"}


def test_only_old_half_built_entries_that_nobody_holds_are_removed(text_folder: Path, tmp_path: Path):
    (dead,) = stopped(text_folder, tmp_path, "train-00000.bin")
    dead.kill()
    dead.communicate()
    left = names(tmp_path)
    (tmp_path / ".files-notes").mkdir()  # not ours: stays
    prepare(files(text_folder, tmp_path, vocab_size=310), quiet)
    assert left < names(tmp_path)
    (lock,) = tmp_path.glob(".*.lock")
    os.utime(lock, (0, 0))
    with lock.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        prepare(files(text_folder, tmp_path, vocab_size=320), quiet)
    assert left < names(tmp_path)
    prepare(files(text_folder, tmp_path, vocab_size=330), quiet)
    assert not left & names(tmp_path) and (tmp_path / ".files-notes").is_dir()


# --- a cache that cannot be written


def test_a_file_where_the_cache_should_be(small_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "file").write_text("mine")
    for place, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "cache", "Not a directory")):
        error = refused(train.main, [*small_run, f"--data.cache_dir={place}"], capsys)
        assert f"data.cache_dir {place} cannot be written ({why}): choose another" in error
    assert (tmp_path / "file").read_text() == "mine" and names(tmp_path) == {"file"}


def test_a_read_only_cache_is_used_but_not_written(small_run: list[str], text_folder: Path, tmp_path: Path):
    """A mount of its own: where the tests run as root, permissions bind nobody."""
    cache = tmp_path / "cache"
    made = prepare(files(text_folder, cache, val_fraction=0.25), quiet)
    mount = f"mount --bind '{cache}' '{cache}' && mount -o remount,ro,bind '{cache}' && ! touch '{cache}/x' 2>/dev/null"
    alone = ["unshare", "-rm", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*alone, mount], capture_output=True).returncode:
        pytest.skip("no read-only mount can be made here")
    # What train.py does with its settings before it needs torch.
    code = """
import sys
from configs.schema import parse_experiment, run_guarded
from data.prepare import prepare
config = parse_experiment(sys.argv[1:])
run_guarded("train.py", lambda: print(prepare(config.data).folder), False)
"""

    def go(*more: str) -> subprocess.CompletedProcess:
        command = [*alone, f'{mount} && exec "$@"', "sh", sys.executable, "-c", code, *small_run]
        return subprocess.run([*command, f"--data.cache_dir={cache}", *more], cwd=ROOT, capture_output=True, text=True)

    done = go("--data.vocab_size=310")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"data.cache_dir {cache} cannot be written (Read-only file system): choose another" in done.stderr
    done = go()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{made.folder}\n", "")
    assert names(cache) == {made.folder.name}


# --- a run that was moved


def test_a_moved_run_without_its_cache(
    small_run: list[str], text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    texts, cache, home = tmp_path / "texts", tmp_path / "cache", tmp_path / "far" / "away"
    shutil.copytree(text_folder, texts)
    train.main([*small_run, f"--data.path={texts}", f"--data.cache_dir={cache}", "--train.steps=2"])
    capsys.readouterr()
    home.mkdir(parents=True)
    (tmp_path / "runs" / "run").rename(home / "run")
    shutil.rmtree(cache)
    run = home / "run"
    write = [str(run), "--prompt=the rope", "--max_new_tokens=2"]
    measure = [str(run), "--targets=64", "--copies=2", "--variants=false"]
    resume = ["--config", str(run / "config.yaml"), "--resume=true", "--train.steps=4"]

    generate.main(write)
    assert capsys.readouterr().out.startswith("the rope") and not cache.exists()
    evaluate.main(measure)
    assert len(names(cache)) == 1 and "by_position" in json.loads((run / "lengths.json").read_text())
    shutil.rmtree(cache)
    # config.yaml names the old place.
    assert "run holds no run to resume: check name and out_dir" in refused(train.main, resume, capsys)
    train.main([*resume, f"--out_dir={home}"])
    assert names(run / "checkpoints") == {"step-0000002", "step-0000004"} and len(names(cache)) == 1

    # With other text in its place, nothing goes on as if it were the same.
    (texts / "00.txt").write_text("another text\n" * 100)
    before = (run / "lengths.json").read_bytes()
    assert "was trained on other data than its settings give now" in refused(evaluate.main, measure, capsys)
    again = [*resume, f"--out_dir={home}", "--train.steps=6"]
    assert "was trained on other data than data.source files gives now" in refused(train.main, again, capsys)
    # And without any text, both say what they need; the run still writes.
    shutil.rmtree(texts)
    shutil.rmtree(cache)
    for main, arguments in ((evaluate.main, measure), (train.main, again)):
        assert f"data.path {texts} matches no file" in refused(main, arguments, capsys)
    assert (run / "lengths.json").read_bytes() == before and not cache.exists()
    generate.main(write)
    assert capsys.readouterr().out.startswith("the rope")


# --- memory

MEMORY = """
import sys
import numpy as np
from pathlib import Path
from data import batches
from data.prepare import PreparedData

def private() -> int:
    lines = (line.split() for line in open("/proc/self/smaps_rollup"))
    sizes = {line[0]: int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
    return max(sizes["Private_Dirty:"], sizes["Anonymous:"])

folder, context, size = Path(sys.argv[1]), 128, 32
shards = {"shards": sorted(path.name for path in folder.glob("*.bin"))}
batches.TrainingOrder(10, 1, 0).at(0)
before = most = private()
tokens = PreparedData(folder, {"dtype": "uint16", "train": shards}).tokens("train")
order = batches.TrainingOrder(batches.window_count(tokens, context), size, 0)
for step in range(5000):
    x, y = batches.cut(tokens, order.at(step) * context, context)
    if step % 250 == 249:
        most = max(most, private())
print(len(tokens) * 2, most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell private memory")
def test_5000_batches_of_500_megabytes_keep_memory_small(tmp_path: Path):
    """File pages that were read may stay, since the system takes them back at will; nothing else may grow."""
    block = np.random.default_rng(0).integers(0, 2**16, 5_000_000).astype(np.uint16).tobytes()
    for shard in range(5):
        with (tmp_path / f"train-{shard:05d}.bin").open("wb") as file:
            for _ in range(10):
                file.write(block)
            os.fsync(file.fileno())  # pages not yet written to disk would count as dirty, as prepare's do not
    done = run_program("-c", MEMORY, tmp_path)
    assert done.returncode == 0, done.stderr
    size, growth = map(int, done.stdout.split())
    print(f"private memory grew by {growth / 1e6:.1f} MB over 5,000 batches of {size / 1e6:.0f} MB of shards")
    assert size == 500_000_000 and growth < 50_000_000
    shutil.rmtree(tmp_path)
