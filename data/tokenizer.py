"""Byte-level BPE: training, loading, and how many bytes of text each id stands for."""

import codecs
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# What the common pretrained tokenizers call the token between documents.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")

# Longer texts are encoded in pieces, one core each: small ones take less memory and are a tenth faster, but some
# tokenizers must be asked at every cut, which takes longer.
PIECE, ASKED_PIECE = 2**12, 2**18
# After a letter, before a space or line break and another letter.
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?=[ \n][^\W\d_])")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with id 0 as end-of-text; a small text may yield fewer ids than asked.

    The full alphabet of 256 bytes is in the vocabulary, so that any text survives encode and decode,
    and no space is put before the first word.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return _text_stays_text(tokenizer)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load a tokenizer.json, or a tokenizer of the Hugging Face hub by name.

    ValueError if it cannot be had, is not byte-level, has no token that ends a text, or changes the text.
    """
    try:
        tokenizer = Tokenizer.from_file(str(name)) if Path(name).is_file() else Tokenizer.from_pretrained(str(name))
    except Exception as error:
        raise ValueError(
            f"tokenizer {name} is neither a readable tokenizer.json nor found on the hub: {error}"
        ) from error
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise ValueError(
            f"tokenizer {name} is not byte-level, so bits per byte cannot be counted: choose a byte-level BPE"
        )
    end_of_text_id(tokenizer)
    # Trained without the full alphabet it drops bytes it never saw; or it puts a space before the first word.
    lacks = len(set(pre_tokenizers.ByteLevel.alphabet()) - tokenizer.get_vocab().keys())
    if lacks or _text_stays_text(tokenizer).decode(tokenizer.encode("rope", add_special_tokens=False).ids) != "rope":
        raise ValueError(
            f"tokenizer {name} does not give back the text it was given, for it "
            f"{f'lacks {lacks} of the 256 bytes' if lacks else 'adds to it (see add_prefix_space)'}: choose another"
        )
    return tokenizer


def _text_stays_text(tokenizer: Tokenizer) -> Tokenizer:
    # A document that quotes "<|endoftext|>" must not end there.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def pieces(text: str, tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """Cut a long text between words, so that the ids of the pieces are those of the whole.

    Our own pre-tokenizer and GPT-2's always part there. Any other `tokenizer` is asked at every cut, with the text
    around it; what it would not part stays long.
    """
    if len(text) <= PIECE:
        yield text
        return
    ask, start = tokenizer is not None and not _parts_words(tokenizer), 0
    size = ASKED_PIECE if ask else PIECE
    while len(text) - start > size:
        for match in itertools.islice(BETWEEN_WORDS.finditer(text, start + size), 50):
            cut = match.start()
            if not ask or _parts_at(tokenizer, text[max(start, cut - 1000) : cut], text[cut : cut + 1000]):
                break
        else:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _parts_words(tokenizer: Tokenizer) -> bool:
    """Whether it surely parts a letter from a space with a letter after it: GPT-2's pre-tokenizer, and nothing else."""
    first = tokenizer.pre_tokenizer
    by_words = isinstance(first, pre_tokenizers.ByteLevel) and first.use_regex and tokenizer.normalizer is None
    return by_words and all(token.special for token in tokenizer.get_added_tokens_decoder().values())


def _parts_at(tokenizer: Tokenizer, before: str, after: str) -> bool:
    # No merge crosses from one pre-token to the next; the ids tell whether normalizers and added tokens agree.
    first = tokenizer.pre_tokenizer
    if first is None or len(before) not in {end for _, (_, end) in first.pre_tokenize_str(before + after)}:
        return False
    whole, left, right = tokenizer.encode_batch_fast([before + after, before, after], add_special_tokens=False)
    return whole.ids == left.ids + right.ids


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Id of the token between documents; ValueError if the vocabulary has none that we know."""
    for name in END_OF_TEXT_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise ValueError(f"the tokenizer has none of the end-of-text tokens {', '.join(END_OF_TEXT_NAMES)}")


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id; some tokenizers leave ids unused."""
    return max(tokenizer.get_vocab().values()) + 1


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of UTF-8 text each id stands for, also where it ends inside a character; b"" for special tokens."""
    # GPT-2's byte-level alphabet: printable bytes are themselves, the others are moved up from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(moved)}
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * vocabulary_size(tokenizer)
    for name, token in tokenizer.get_vocab().items():
        if token not in added:
            table[token] = bytes(byte_of[character] for character in name)
        elif not added[token].special:
            table[token] = name.encode()
    return table


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """How many bytes of text each id stands for, `(vocab,)` int64."""
    return np.array([len(text) for text in token_bytes(tokenizer)], dtype=np.int64)


class TextStream:
    """Turns ids into text one at a time and never gives out half a character.

    All that was fed and finished equals the ids decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes = token_bytes(tokenizer)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Text that is complete with this id; it may be empty."""
        return self.decoder.decode(self.bytes[token])

    def finish(self) -> str:
        """What an unfinished character at the very end leaves: a replacement character, or nothing."""
        return self.decoder.decode(b"", final=True)


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokenizer's full JSON."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
