"""From token ids to more token ids; knows no tokenizer."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from model.config import ModelConfig


class KVCache:
    """Keys and values of the tokens so far, in memory sized to the request.

    Args:
        config: shape of the model.
        batch: number of rows.
        capacity: longest sequence it has room for, in tokens.
        dtype, device: those of the model's activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch, config.kv_heads, capacity, config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.values = [torch.empty_like(keys) for keys in self.keys]
        self.tokens = torch.zeros((batch, capacity), dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.length = 0

    def extend(
        self, tokens: Int[Tensor, "batch seq"], positions: Int[Tensor, "#batch seq"]
    ) -> tuple[Int[Tensor, "batch keys"], Int[Tensor, "batch keys"]]:
        """Record the tokens about to be fed; return ids and positions of all so far. ValueError when full."""
        end = self.length + tokens.shape[1]
        if end > self.tokens.shape[1]:
            raise ValueError(f"the cache has room for {self.tokens.shape[1]} tokens and was given {end}")
        self.tokens[:, self.length : end] = tokens
        self.positions[:, self.length : end] = positions
        return self.tokens[:, :end], self.positions[:, :end]

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        v: Float[Tensor, "batch kv_heads seq head_dim"],
    ) -> tuple[Float[Tensor, "batch kv_heads keys head_dim"], Float[Tensor, "batch kv_heads keys head_dim"]]:
        """Store the new keys and values of one layer; return views of all of that layer's."""
        seq, keys, values = k.shape[2], self.keys[layer], self.values[layer]
        keys.narrow(2, self.length, seq).copy_(k)
        values.narrow(2, self.length, seq).copy_(v)
        return keys.narrow(2, 0, self.length + seq), values.narrow(2, 0, self.length + seq)


def sample_next(
    logits: Float[Tensor, "batch vocab"],
    generators: Sequence[torch.Generator] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Tensor, "batch"]:
    """Draw one id per row.

    Args:
        logits: scores of the next token.
        generators: one for each row, so that a row's draws do not depend on how many rows there are; the global
            generator is never touched. Not needed at temperature 0.
        temperature: divides the logits; 0 takes the largest.
        top_k: keep the k largest (0 keeps all; more than the vocabulary keeps all).
        top_p: keep the smallest set of most likely ids whose probability reaches top_p, never less than
            one (nucleus sampling, Holtzman et al. 2020); 1 keeps all.

    Raises:
        ValueError: temperature or top_k below 0, top_p outside [0, 1], or no generators to draw from.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    if generators is None or len(generators) != logits.shape[0]:
        raise ValueError("sampling at a temperature above 0 needs a generator for each row")
    # Subtracting the maximum first keeps tiny temperatures finite.
    logits = logits.float()
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    if 0 < top_k < scaled.shape[-1]:
        scores, ids = scaled.topk(top_k, dim=-1)
    else:
        scores, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    probabilities = scores.softmax(-1)
    if top_p < 1:
        # An id stays if the ones before it have not reached top_p yet: the crossing one is included.
        reached = probabilities.cumsum(-1) - probabilities >= top_p
        reached[:, 0] = False
        probabilities = probabilities.masked_fill(reached, 0.0)
    # The first id at which the running sum passes a uniform share of the whole.
    sums = probabilities.cumsum(-1)
    shares = torch.cat([torch.rand(1, generator=generator, device=logits.device) for generator in generators])
    drawn = torch.searchsorted(sums, shares[:, None] * sums[:, -1:], right=True)
    # Rounding could lead past the last id that was kept.
    drawn = drawn.minimum((probabilities > 0).sum(-1, keepdim=True) - 1)
    return ids.gather(-1, drawn)[:, 0]


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """ValueError that names the first sampling setting that makes no sense."""
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is {temperature}: give 0 (greedy) or a finite value above it")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}: give 0 (off) or more")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p}: give a value in [0, 1]; 1 is off")


@torch.inference_mode()
def generate(
    model: "model.transformer.Transformer",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    generators: Sequence[torch.Generator] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    end_of_text: int | None = None,
    vocab_size: int | None = None,
    forward: Callable[..., Float[Tensor, "batch vocab"]] | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next id of every row until each has made max_new_tokens or its end-of-text.

    What all prompts have room for goes in at once, then one token a row on top of the cache. There is no padding: a row
    whose prompt is longer than the shortest is fed the rest of it, and yields None meanwhile, as it does after its end.
    There is no longest length: past the trained context the positions simply count on. The model's train/eval mode is
    restored.

    Args:
        prompts: ids of each row's prompt.
        generators: see sample_next.
        end_of_text: the id that ends a row.
        vocab_size: ids from here on only pad the embedding matrix and are never made.
        forward: what is called instead of the model's last_logits, such as a compiled form of it.

    Raises:
        ValueError: an empty prompt, or sampling settings that sample_next refuses.
    """
    check_sampling(temperature, top_k, top_p)
    if not all(prompts):
        raise ValueError("a prompt holds no token: start from end-of-text instead")
    rows, device = len(prompts), model.embedding.weight.device
    lengths = [len(prompt) for prompt in prompts]
    shortest = min(lengths)
    cache = KVCache(model.config, rows, max(lengths) + max_new_tokens, model.embedding.weight.dtype, device)
    tokens = torch.tensor([list(prompt[:shortest]) for prompt in prompts], device=device)
    left = [max_new_tokens] * rows
    forward = forward or model.last_logits
    was_training = model.training
    model.eval()
    try:
        for length in itertools.count(shortest):
            if not any(left):
                return
            logits = forward(tokens, cache)[:, :vocab_size]
            # Rows that still read or have ended draw nothing, so that their generators stand still.
            drawing = [row for row in range(rows) if lengths[row] <= length and left[row]]
            draws = generators and [generators[row] for row in drawing]
            chosen = logits if len(drawing) == rows else logits[drawing]
            drawn = sample_next(chosen, draws, temperature, top_k, top_p).tolist() if drawing else []
            made: list[int | None] = [None] * rows
            for row, token in zip(drawing, drawn, strict=True):
                made[row], left[row] = token, 0 if token == end_of_text else left[row] - 1
            if drawing:
                yield made
            # What a row that has ended is fed does not matter.
            fed = [
                prompt[length] if length < len(prompt) else token or 0
                for prompt, token in zip(prompts, made, strict=True)
            ]
            tokens = torch.tensor(fed, device=device)[:, None]
    finally:
        model.train(was_training)
