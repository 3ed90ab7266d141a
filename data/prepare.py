"""Documents -> token shards and a manifest, made once and found again by a fingerprint of all that went in.

    cache/sotu-3f0c.../manifest.json      sources, counts, dtype, fingerprints
                       tokenizer.json
                       train-00000.bin    ids, end-of-text after every document
                       train-starts.npy   index of the first id of every document
                       val-00000.bin, val-starts.npy

A cache entry appears whole, by one rename, or not at all. Every file of it is checked against its
SHA-256 when it is opened.
"""

import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from data import tokenizer as tok
from data.config import DataConfig
from data.corpus import Corpus, held_out_groups, open_corpus, sha256

# Raise when the same settings would give other bytes than before.
FORMAT = 1
# The disk, a quota or a limit on file sizes.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHARD_TOKENS = 2**27
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
class PreparedData:
    """A finished cache entry."""

    folder: Path
    manifest: dict

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tok.load_tokenizer(self.folder / "tokenizer.json")

    def tokens(self, split: str) -> Tokens:
        dtype = np.dtype(self.manifest["dtype"])
        return Tokens([np.memmap(self.folder / name, dtype, "r") for name in self.manifest[split]["shards"]])

    def document_starts(self, split: str) -> np.ndarray:
        """Index of the first id of every document, and the number of ids as last entry, `(documents + 1,)`."""
        return np.load(self.folder / f"{split}-starts.npy")


def prepare(config: DataConfig, say: Callable[[str], None] = print) -> PreparedData:
    """Find the prepared data of these settings, or make it.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: no usable text, or a cache entry that was damaged.
    """
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
        return _open(folder, fingerprint)

    say(f"preparing {config.source} data in {folder}")
    with _temporary(cache, folder.name) as building:
        manifest = _build(building, corpus, pretrained, config)
        checksums = {path.name: sha256(path) for path in sorted(building.iterdir())}
        manifest |= {"fingerprint": fingerprint, "identity": identity, "sha256": checksums}
        _write(building / "manifest.json", json.dumps(manifest, indent=2).encode())
        try:
            os.rename(building, folder)
        except OSError:
            # Another process made the same entry first; its content is the same.
            if not folder.is_dir():
                raise
    return _open(folder, fingerprint)


@contextmanager
def _temporary(cache: Path, name: str) -> Iterator[Path]:
    """A folder to build an entry in, gone afterwards. What killed preparations left behind is removed first."""
    building, lock = cache / f".{name}-{secrets.token_hex(4)}", -1
    try:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = os.open(cache, os.O_RDONLY)
            # Builders share the lock: who has it alone knows that the makers of what lies there are dead.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in cache.glob(f".*-{'[0-9a-f]' * 16}-{'[0-9a-f]' * 8}"):
                    shutil.rmtree(left, ignore_errors=True)
            with suppress(OSError):  # a file system without locks keeps what lies there
                fcntl.flock(lock, fcntl.LOCK_SH)
            building.mkdir()
        except OSError as error:
            raise ValueError(f"data.cache_dir {cache} cannot be written ({error.strerror}): choose another") from None
        yield building
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        reason = f"{error.strerror}; make room, or choose another data.cache_dir"
        raise OSError(f"cannot write {building}: {reason}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _open(folder: Path, fingerprint: str) -> PreparedData:
    remedy = f"delete {folder} and run again"
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["fingerprint"] != fingerprint:
            raise ValueError(f"{folder} was made from other data or settings: {remedy}")
        for name, checksum in manifest["sha256"].items():
            if sha256(folder / name) != checksum:
                raise ValueError(f"{folder / name} is not as it was written: {remedy}")
    except (OSError, UnicodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is damaged ({error}): {remedy}") from error
    return PreparedData(folder, manifest)


def _build(folder: Path, corpus: Corpus, pretrained: Tokenizer | None, config: DataConfig) -> dict:
    groups = [document.group for document in corpus]
    if not groups:
        raise ValueError(f"data.source {config.source} {config.path or ''} holds no document")
    held_out = held_out_groups(groups, config.val_fraction, config.split_seed)

    def texts(split: str) -> Iterator[str]:
        for document in corpus:
            if held_out:
                if (document.group in held_out) == (split == "val"):
                    yield document.text
            else:
                # One text alone cannot be split by document: its end is held out.
                cut = round(len(document.text) * (1 - config.val_fraction))
                yield document.text[cut:] if split == "val" else document.text[:cut]

    tokenizer = pretrained or tok.train_tokenizer(texts("train"), config.vocab_size)
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    vocab_size = tok.vocabulary_size(tokenizer)
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    counts = {split: _write_split(folder, split, texts(split), tokenizer, dtype) for split in SPLITS}
    return {
        "split_by": "document" if held_out else "the end of the only document is held out",
        "vocab_size": vocab_size,
        "dtype": dtype.name,
        "tokenizer_sha256": tok.fingerprint(tokenizer),
        "settings": dataclasses.asdict(config),
        **counts,
    }


def _write_split(folder: Path, split: str, texts: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype) -> dict:
    end_of_text = tok.end_of_text_id(tokenizer)
    starts, total, size, shards = [0], 0, 0, []
    for name, documents in _shards(split, _encode(tokenizer, texts)):
        with (folder / name).open("wb") as file:
            for text_bytes, ids in documents:
                # Array construction from a list checks the range; astype would wrap silently.
                file.write(np.array([*ids, end_of_text], dtype=dtype).tobytes())
                size += text_bytes
                total += len(ids) + 1
                starts.append(total)
            file.flush()
            os.fsync(file.fileno())
        shards.append(name)
    with (folder / f"{split}-starts.npy").open("wb") as file:
        np.save(file, np.array(starts, dtype=np.int64))
        file.flush()
        os.fsync(file.fileno())
    lengths = np.diff(starts)
    return {
        "shards": shards,
        "documents": len(lengths),
        "tokens": total,
        "bytes": size,
        "longest_document_tokens": int(lengths.max(initial=0)),
    }


def _shards(split: str, documents: Iterator[tuple[int, list[int]]]) -> Iterator[tuple[str, Iterator]]:
    """Cut the documents into shards of about SHARD_TOKENS ids; a document is never cut."""
    for number in itertools.count():
        first = next(documents, None)
        if first is None:
            return

        def one_shard(document: tuple[int, list[int]] = first) -> Iterator[tuple[int, list[int]]]:
            written = 0
            while document is not None:
                yield document
                written += len(document[1]) + 1
                document = next(documents, None) if written < SHARD_TOKENS else None

        yield f"{split}-{number:05d}.bin", one_shard()


def _encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[int, list[int]]]:
    """(UTF-8 bytes, ids) of every non-empty text, encoded some megabytes at a time on all cores."""
    batch, characters = [], 0
    for text in itertools.chain(texts, [None]):
        if text:
            batch.append(text)
            characters += len(text)
        if batch and (text is None or characters > 4_000_000):
            for piece, encoding in zip(
                batch, tokenizer.encode_batch_fast(batch, add_special_tokens=False), strict=True
            ):
                yield len(piece.encode()), encoding.ids
            batch, characters = [], 0


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
