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

    def split(
        self, heads: Float[Tensor, "batch seq heads head_dim"], queries: int, keys: int
    ) -> tuple[Float[Tensor, "batch queries seq head_dim"], Tensor, Tensor]:
        """Queries, keys and values out of the heads of one product, which lie in this order; the first two rotated.

        No hook: how it is done, not what. `heads` may be overwritten. Keys and values are `(batch, keys, seq, head_dim)`.
        """
        # Split before heads and tokens change places: the gradients are joined as the product wants them, without a copy.
        qk, v = heads.split_with_sizes((queries + keys, keys), dim=2)
        turned = self.rotate(qk.transpose(1, 2)).transpose(1, 2)
        q, k = turned.split_with_sizes((queries, keys), dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def bias(self) -> Float[Tensor, "#batch heads seq keys"] | None:
        """Biases: what is added to the attention scores after division by sqrt(head_dim), or None."""
        return None
