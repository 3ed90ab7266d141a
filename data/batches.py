"""Which windows of the token stream are read at which step, and the one place where y is x shifted by one."""

import itertools
from dataclasses import dataclass

import numpy as np

from data.prepare import Tokens


def cut(tokens: Tokens, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Read windows x and their targets y, the token after each of x: both `(windows, length)` int64."""
    spans = np.stack([tokens.read(int(start), int(start) + length + 1) for start in starts])
    return spans[:, :-1], spans[:, 1:]


def window_count(tokens: Tokens, context: int) -> int:
    """Windows of `context` tokens that do not share a target; each needs one token more for its last target."""
    return max(0, (len(tokens) - 1) // context)


@dataclass(frozen=True)
class TrainingOrder:
    """Every window once an epoch, in an order that is a pure function of (seed, step).

    Nothing is stored and no state is carried on, so a resumed run and any number of processes see the
    same batches. Batches run on across the edge of an epoch.

    Args:
        windows: how many windows there are.
        batch_size: windows a step, over all processes.
        seed: decides the order.
    """

    windows: int
    batch_size: int
    seed: int

    def at(self, step: int) -> np.ndarray:
        """Window numbers of step 0, 1, 2, ...: `(batch_size,)` int64."""
        index = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        epoch, place = np.divmod(index, self.windows)
        return permute(place, self.windows, self.seed, epoch)


def permute(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Place in a pseudo-random order of 0 .. size-1, in O(1) memory: a different bijection for every epoch.

    A four-round Feistel network (Luby and Rackoff 1988) permutes the next power of four; what falls
    outside 0 .. size-1 is sent through again until it falls inside (cycle walking, Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    key = _mix(_mix(np.full(index.shape, seed % 2**64, np.uint64)) + epoch.astype(np.uint64))
    value = index.astype(np.uint64)
    outside = np.ones(index.shape, bool)
    while outside.any():
        left, right, round_key = value[outside] >> half, value[outside] & low, key[outside]
        for _ in range(4):
            round_key = _mix(round_key)
            left, right = right, left ^ (_mix(right + round_key) & low)
        value[outside] = (left << half) | right
        outside = value >= size
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def validation_starts(tokens: Tokens, context: int, windows: int) -> np.ndarray:
    """Starts of at most `windows` fixed windows, spread evenly over the split and sharing no target."""
    available = window_count(tokens, context)
    chosen = min(windows, available)
    return np.arange(chosen, dtype=np.int64) * available // max(1, chosen) * context


def block_ends(document_starts: np.ndarray, longest_context: int, block: int, targets: int) -> np.ndarray:
    """Where blocks of target tokens end, for scoring the same targets at every context.

    A block is `block` consecutive target tokens; its end is the index of the last. All contexts up to
    `longest_context` that end there lie inside one document. Blocks do not overlap; if there are more
    than `targets` asks for, an even spread of them is taken.

    Args:
        document_starts: from PreparedData.document_starts, `(documents + 1,)`.
        longest_context: tokens fed for the longest context.
        block: targets a block.
        targets: how many targets are wanted in all.

    Returns `(blocks,)` int64, sorted; empty if no document is longer than `longest_context`.
    """
    ends = [
        # The document's last id is its end-of-text, which is no target here.
        np.arange(start + longest_context, stop - 1, block)
        for start, stop in itertools.pairwise(document_starts)
    ]
    every = np.concatenate(ends) if ends else np.empty(0, np.int64)
    chosen = min(-(-targets // block), len(every))
    return every[np.arange(chosen) * len(every) // max(1, chosen)].astype(np.int64)
