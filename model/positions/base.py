"""The three places where a position encoding can act on a transformer."""

from jaxtyping import Float, Int
from torch import Tensor

from model.config import ModelConfig


class PositionEncoding:
    """One encoding, prepared once per forward pass from the positions, then asked by every block.

    A subclass overrides the hooks it needs; each is the identity by default, so this class itself
    adds nothing anywhere. Instances live for one forward pass and own no parameters and no buffers:
    nothing of them reaches a state dict, and no `.to(dtype)` can round their tables.

    Args:
        config: the model's shape and the settings of the encoding.
        positions: position of every token fed in, `(batch, seq)`, or `(1, seq)` when all rows agree.
        key_positions: position of every key that can be attended to, `(batch, keys)`: the cached
            tokens and then those fed in. Without a cache it is `positions`.
    """

    def __init__(
        self,
        config: ModelConfig,
        positions: Int[Tensor, "#batch seq"],
        key_positions: Int[Tensor, "#batch keys"],
    ) -> None:
        self.config = config

    @classmethod
    def outgrows_cache(cls, config: ModelConfig, length: int) -> bool:
        """Whether a sequence of `length` tokens encodes its first tokens otherwise than a shorter one did.

        Cached keys and values would be wrong then, so such a sequence is read anew as a whole.
        """
        return False

    def embed(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """Absolute encodings: change the token embeddings, once, before the first block."""
        return x

    def rotate(self, x: Float[Tensor, "batch heads seq head_dim"]) -> Float[Tensor, "batch heads seq head_dim"]:
        """Rotary encodings: turn the heads of queries and of keys, in every attention layer."""
        return x

    def bias(self) -> Float[Tensor, "#batch heads seq keys"] | None:
        """Biases: what is added to the attention scores after division by sqrt(head_dim), or None."""
        return None
