"""Documents -> token shards and a manifest, made once and found again by a fingerprint of all that went in.

    cache/sotu-3f0c.../manifest.json      sources, counts, dtype, fingerprints
                       tokenizer.json
                       train-00000.bin    ids, end-of-text after every document
                       train-starts.npy   index of the first id of every document
                       val-00000.bin, val-starts.npy

A cache entry appears whole, by one rename, or not at all. It is built in a hidden folder beside its place, under
a lock; a preparation that was killed is gone on with, and its finished shards are not made again. Memory is needed for
the longest document and some megabytes of text, not for the whole.

When an entry is opened, the sizes of all its files are checked, and the SHA-256 of the first CHECKED_BYTES of them,
which is all of a small entry. Of a larger one that leaves shards whose content was not looked at:
scripts/prepare_data.py looks at every byte.
"""

import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tokenizers
from tokenizers import Tokenizer
from tqdm import tqdm

from data import tokenizer as tok
from data.config import DataConfig
from data.corpus import Corpus, Document, group_rank, held_out_below, open_corpus, sha256

# Raise when the same settings would give other bytes than before.
FORMAT = 1
# The disk, a quota or a limit on file sizes.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHARD_TOKENS = 2**24
# Text that is encoded at a time: enough long documents for some cores, and some 200 MB of what the encoder makes of it.
BATCH_CHARACTERS = 2**21
CHECKED_BYTES = 2**30
# A half-built entry that nobody has gone on with for so many seconds is removed.
ABANDONED = 7 * 24 * 3600
# One line for every finished shard of a half-built entry.
FINISHED = "finished.jsonl"
SPLITS = ("train", "val")
# Settings that decide what is in the cache; the others (context, cache_dir) only how it is read.
CONTENT_SETTINGS = ("val_fraction", "split_seed", "vocab_size")


class Tokens:
    """The ids of one split, read from shards on disk as if they were one array."""

    def __init__(self, shards: list[np.ndarray]) -> None:
        self.shards = shards
        self.ends = np.cumsum([len(shard) for shard in shards])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids start .. stop-1 as int64; IndexError outside the split."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"ids {start} to {stop} of {len(self)}")
        parts = []
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            end = int(self.ends[shard])
            offset = end - len(self.shards[shard])
            parts.append(self.shards[shard][start - offset : min(stop, end) - offset])
            start, shard = min(stop, end), shard + 1
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)


@dataclass(frozen=True)
class Work:
    """What one call of `prepare` has encoded; `seconds` are all it took, but for the training of a tokenizer."""

    documents: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PreparedData:
    """A finished cache entry; `work` is None where it was found ready."""

    folder: Path
    manifest: dict
    work: Work | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tok.load_tokenizer(self.folder / "tokenizer.json")

    def tokens(self, split: str) -> Tokens:
        dtype = np.dtype(self.manifest["dtype"])
        return Tokens([np.memmap(self.folder / name, dtype, "r") for name in self.manifest[split]["shards"]])

    def document_starts(self, split: str) -> np.ndarray:
        """Index of the first id of every document, and the number of ids as last entry, `(documents + 1,)`."""
        return np.load(self.folder / _starts_name(split))


def prepare(
    config: DataConfig, say: Callable[[str], None] = print, *, progress: bool = False, check_all: bool = False
) -> PreparedData:
    """Find the prepared data of these settings, or make it; where another process makes it already, wait for it.

    Args:
        say: gets a line when there is something to do.
        progress: draw bars on stderr.
        check_all: compare every byte of the entry with its checksums, however large it is.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: no usable text, or a cache entry that was damaged.
        OSError: no room for it; what is finished stays, to go on with.
    """
    started = time.perf_counter()
    corpus = open_corpus(config)
    pretrained = tok.load_tokenizer(config.tokenizer) if config.tokenizer else None
    identity = {
        "format": FORMAT,
        "corpus": corpus.identity,
        "tokenizer": tok.fingerprint(pretrained)
        if pretrained
        else f"byte-level BPE of tokenizers {tokenizers.__version__}",
        "settings": {name: getattr(config, name) for name in CONTENT_SETTINGS},
    }
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    cache = Path(config.cache_dir).expanduser()
    folder = cache / f"{config.source}-{fingerprint[:16]}"
    if folder.is_dir():
        return _open(folder, fingerprint, check_all)

    say(f"preparing {config.source} data in {folder}")
    work = None
    with _building_place(cache, folder.name, say) as building:
        if not folder.is_dir():  # else the process that was waited for has made it
            building.mkdir(exist_ok=True)
            if not (building / "manifest.json").exists():
                manifest, work = _build(building, corpus, pretrained, config, say, progress)
                work = replace(work, seconds=time.perf_counter() - started - work.seconds)
                manifest |= {"fingerprint": fingerprint, "identity": identity}
                with _whole(building / "manifest.json") as file:
                    file.write(json.dumps(manifest, indent=2).encode())
            for name in (FINISHED, *map(_lengths_name, SPLITS)):
                (building / name).unlink(missing_ok=True)
            os.rename(building, folder)
    return replace(_open(folder, fingerprint, check_all), work=work)


@contextmanager
def _building_place(cache: Path, name: str, say: Callable[[str], None]) -> Iterator[Path]:
    """Path of the half-built entry, for this process alone; there may be something of a killed one to go on with.

    Afterwards it is gone, unless shards were finished and it was no fault of theirs that there are no more.
    """
    building, lock_file = cache / f".{name}", cache / f".{name}.lock"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache, lock_file)
        lock = _lock(lock_file, lambda: say(f"waiting for the process that prepares {cache / name}"))
    except OSError as error:
        raise ValueError(f"data.cache_dir {cache} cannot be written ({error.strerror}): choose another") from None
    try:
        yield building
    except BaseException as error:
        no_room = isinstance(error, OSError) and error.errno in NO_ROOM
        if not (building / FINISHED).exists() or (isinstance(error, Exception) and not no_room):
            shutil.rmtree(building, ignore_errors=True)
        if not no_room:
            raise
        reason = f"{error.strerror}; make room, or choose another data.cache_dir"
        raise OSError(f"cannot write {building}: {reason}") from error
    finally:
        if not building.exists():
            lock_file.unlink(missing_ok=True)
        os.close(lock)


def _lock(path: Path, waits: Callable[[], None]) -> int:
    """Lock a file and return its descriptor; closing it, or the end of the process, opens the lock."""
    while True:
        path.touch()
        lock = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Who had the lock may have removed the file, and a third process locked a new one.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)


def _remove_abandoned(cache: Path, own: Path) -> None:
    for path in cache.glob(f".*-{'[0-9a-f]' * 16}.lock"):
        with suppress(OSError):
            if path != own and time.time() - path.stat().st_mtime > ABANDONED:
                with path.open("r+b") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                    path.unlink()


def _open(folder: Path, fingerprint: str, check_all: bool) -> PreparedData:
    remedy = f"delete {folder} and run again"
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["fingerprint"] != fingerprint:
            raise ValueError(f"{folder} was made from other data or settings: {remedy}")
        sizes, seen = manifest.get("sizes", {}), 0  # entries of older versions record no sizes
        for name, checksum in manifest["sha256"].items():
            size = (folder / name).stat().st_size
            seen += size
            look = check_all or seen <= CHECKED_BYTES
            if sizes.get(name, size) != size or (look and sha256(folder / name) != checksum):
                raise ValueError(f"{folder / name} is not as it was written: {remedy}")
    except (OSError, UnicodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is damaged ({error}): {remedy}") from error
    return PreparedData(folder, manifest)


def _build(
    folder: Path,
    corpus: Corpus,
    pretrained: Tokenizer | None,
    config: DataConfig,
    say: Callable[[str], None],
    progress: bool,
) -> tuple[dict, Work]:
    """Write all files but the manifest; the work's `seconds` are those of training the tokenizer."""
    finished = _finished(folder)
    if finished:
        say(f"going on after {len(finished)} finished shards")
    total = 0

    def documents(doing: str) -> Iterator[Document]:
        return iter(tqdm(corpus, doing, total or None, unit=" documents", leave=False, disable=not progress))

    def groups() -> Iterator[str]:
        nonlocal total
        for document in documents("reading"):
            total += 1
            yield document.group

    below = held_out_below(groups(), config.val_fraction, config.split_seed)
    if not total:
        raise ValueError(f"data.source {config.source} {config.path or ''} holds no document")

    def texts(doing: str) -> Iterator[tuple[str, str]]:
        for document in documents(doing):
            if below:
                yield "val" if group_rank(document.group, config.split_seed) < below else "train", document.text
            else:
                # One text alone cannot be split by document: its end is held out.
                cut = round(len(document.text) * (1 - config.val_fraction))
                yield "train", document.text[:cut]
                yield "val", document.text[cut:]

    started, path = time.perf_counter(), folder / "tokenizer.json"
    if not path.exists():
        tokenizer = pretrained or tok.train_tokenizer(
            (text for split, text in texts("training the tokenizer") if split == "train"), config.vocab_size
        )
        with _whole(path) as file:
            file.write(tokenizer.to_str(pretty=True).encode())
    tokenizer, seconds = tok.load_tokenizer(path), time.perf_counter() - started

    vocab_size = tok.vocabulary_size(tokenizer)
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    writers = {split: _SplitWriter(folder, split, dtype, finished) for split in SPLITS}
    end_of_text, encoded, size = tok.end_of_text_id(tokenizer), 0, 0

    def remaining() -> Iterator[tuple[str, str]]:
        skip = {split: writer.documents for split, writer in writers.items()}
        for split, text in texts("encoding"):
            if text and skip[split]:
                skip[split] -= 1
            elif text:
                yield split, text

    for split, piece, ids, last in _encode(tokenizer, remaining()):
        text_bytes = len(piece.encode())
        if last:
            ids.append(end_of_text)
        writers[split].write(text_bytes, ids, last)
        encoded += last
        size += text_bytes
    counts = {split: writer.finish() for split, writer in writers.items()}
    files = ["tokenizer.json", *map(_starts_name, SPLITS)]
    shards = {record["shard"]: record["sha256"] for writer in writers.values() for record in writer.records}
    checksums = {name: sha256(folder / name) for name in files} | shards
    manifest = {
        "split_by": "document" if below else "the end of the only document is held out",
        "vocab_size": vocab_size,
        "dtype": dtype.name,
        "tokenizer_sha256": tok.fingerprint(tokenizer),
        "settings": dataclasses.asdict(config),
        **counts,
        "sha256": checksums,
        "sizes": {name: (folder / name).stat().st_size for name in checksums},
    }
    return manifest, Work(encoded, size, seconds)


def _starts_name(split: str) -> str:
    return f"{split}-starts.npy"


def _lengths_name(split: str) -> str:
    return f"{split}-lengths.bin"


def _finished(folder: Path) -> list[dict]:
    """Records of the shards a killed preparation has finished; a last line that is not whole is cut off."""
    path = folder / FINISHED
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    os.truncate(path, sum(map(len, whole)))
    return [json.loads(line) for line in whole]


class _SplitWriter:
    """Writes the documents of one split to shards of about SHARD_TOKENS ids; a document is never cut.

    A shard is finished when all of it is on disk and its record is a line of FINISHED.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, finished: list[dict]) -> None:
        self.folder, self.split, self.dtype = folder, split, dtype
        self.records = [record for record in finished if record["split"] == split]
        self.documents = sum(record["documents"] for record in self.records)
        self.lengths_file = folder / _lengths_name(split)
        self.lengths_file.touch()
        os.truncate(self.lengths_file, 8 * self.documents)
        self.shard: BinaryIO | None = None

    def write(self, text_bytes: int, ids: list[int], last: bool) -> None:
        """Append ids of a piece of a document, of which it may be the last."""
        if self.shard is None:
            self.shard = (self.folder / f"{self.split}-{len(self.records):05d}.bin").open("wb")
            self.checksum, self.lengths, self.bytes, self.tokens, self.length = hashlib.sha256(), array("q"), 0, 0, 0
        # Unlike astype, which would wrap silently, this checks the range.
        content = np.fromiter(ids, self.dtype, len(ids)).data
        self.shard.write(content)
        self.checksum.update(content)
        self.bytes += text_bytes
        self.tokens += len(ids)
        self.length += len(ids)
        if last:
            self.lengths.append(self.length)
            self.length = 0
            if self.tokens >= SHARD_TOKENS:
                self._finish_shard()

    def _finish_shard(self) -> None:
        with self.shard:
            _sync(self.shard)
        with self.lengths_file.open("ab") as file:
            self.lengths.tofile(file)
            _sync(file)
        record = {
            "split": self.split,
            "shard": Path(self.shard.name).name,
            "documents": len(self.lengths),
            "bytes": self.bytes,
            "tokens": self.tokens,
            "sha256": self.checksum.hexdigest(),
        }
        with (self.folder / FINISHED).open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            _sync(file)
        self.records.append(record)
        self.shard = None

    def finish(self) -> dict:
        """Finish the open shard, write where documents start, and return the counts of the split."""
        if self.shard:
            self._finish_shard()
        lengths = np.fromfile(self.lengths_file, np.int64)
        with _whole(self.folder / _starts_name(self.split)) as file:
            np.save(file, np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))))
        return {
            "shards": [record["shard"] for record in self.records],
            "documents": len(lengths),
            "tokens": sum(record["tokens"] for record in self.records),
            "bytes": sum(record["bytes"] for record in self.records),
            "longest_document_tokens": int(lengths.max(initial=0)),
        }


def _encode(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, list[int], bool]]:
    """(split, piece, ids, whether it ends its document) for every piece of the texts, encoded on all cores.

    While two batches are encoded, the one before is handed out and the next one read.
    """

    def batches() -> Iterator[list[tuple[str, str, bool]]]:
        batch, characters = [], 0
        for split, text in texts:
            done = 0
            for piece in tok.pieces(text, tokenizer):
                done += len(piece)
                batch.append((split, piece, done == len(text)))
                characters += len(piece)
                if characters >= BATCH_CHARACTERS:
                    yield batch
                    batch, characters = [], 0
        yield batch

    # Two batches at a time: when the last documents of one leave cores idle, these take documents of the other.
    with ThreadPoolExecutor(2) as pool:
        running = deque()
        for batch in itertools.chain(batches(), [[], []]):  # empty ones push out the last two
            pieces = [piece for _, piece, _ in batch]
            running.append((batch, pool.submit(tokenizer.encode_batch_fast, pieces, add_special_tokens=False)))
            if len(running) > 2:
                batch, encodings = running.popleft()
                for (split, piece, last), encoding in zip(batch, encodings.result(), strict=True):
                    yield split, piece, encoding.ids, last


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name once all of it is on disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        yield file
        _sync(file)
    os.replace(temporary, path)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
