"""From token ids to more token ids; knows no tokenizer."""

import math
from collections.abc import Iterator

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
        shape = (config.n_layers, batch, config.kv_heads, capacity, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
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
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


def sample_next(
    logits: Float[Tensor, "batch vocab"],
    generator: torch.Generator | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Tensor, "batch"]:
    """Draw one id per row.

    Args:
        logits: scores of the next token.
        generator: where the draws come from; the global generator is never touched.
        temperature: divides the logits; 0 takes the largest.
        top_k: keep the k largest (0 keeps all; more than the vocabulary keeps all).
        top_p: keep the smallest set of most likely ids whose probability reaches top_p, never less than
            one (nucleus sampling, Holtzman et al. 2020); 1 keeps all.

    Raises:
        ValueError: temperature or top_k below 0, top_p outside [0, 1], or no generator to draw from.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    if generator is None:
        raise ValueError("sampling at a temperature above 0 needs a generator")
    # Subtracting the maximum first keeps tiny temperatures finite.
    logits = logits.float()
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    scores, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if 0 < top_k < scores.shape[-1]:
        scores = scores[:, :top_k]
    probabilities = scores.softmax(-1)
    if top_p < 1:
        # An id stays if the ones before it have not reached top_p yet: the crossing one is included.
        reached = probabilities.cumsum(-1) - probabilities >= top_p
        reached[:, 0] = False
        probabilities = probabilities.masked_fill(reached, 0.0)
    return ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """ValueError that names the first sampling setting that makes no sense."""
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is {temperature}: give 0 (greedy) or a finite value above it")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}: give 0 (off) or more")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p}: give a value in [0, 1]; 1 is off")


@torch.no_grad()
def generate(
    model: "model.transformer.Transformer",
    prompt: Int[Tensor, "batch prompt"],
    max_new_tokens: int,
    *,
    generator: torch.Generator | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    end_of_text: int | None = None,
) -> Iterator[Int[Tensor, "batch"]]:
    """Yield the next id of every row, up to max_new_tokens times, stopping once all rows ended.

    The prompt goes in at once, then each token alone on top of the cache. There is no longest length:
    past the trained context the positions simply count on. The model's train/eval mode is restored.

    Raises:
        ValueError: an empty prompt, or sampling settings that sample_next refuses.
    """
    check_sampling(temperature, top_k, top_p)
    if prompt.shape[1] == 0:
        raise ValueError("the prompt holds no token: start from end-of-text instead")
    was_training = model.training
    model.eval()
    try:
        weight = model.embedding.weight
        capacity = prompt.shape[1] + max_new_tokens
        cache = KVCache(model.config, prompt.shape[0], capacity, weight.dtype, weight.device)
        ended = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
        tokens = prompt
        for _ in range(max_new_tokens):
            hidden = model.hidden_states(tokens, cache=cache)[:, -1:]
            chosen = sample_next(model.logits(hidden)[:, 0], generator, temperature, top_k, top_p)
            if end_of_text is not None:
                chosen = torch.where(ended, end_of_text, chosen)
                ended |= chosen == end_of_text
            yield chosen
            if end_of_text is not None and bool(ended.all()):
                return
            tokens = chosen[:, None]
    finally:
        model.train(was_training)
