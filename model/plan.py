"""What training a model costs, before anything is built: parameters, FLOPs, memory and time. Needs no torch."""

from dataclasses import dataclass

from model.config import ModelConfig


@dataclass(frozen=True)
class Hardware:
    """One device: dense FLOP/s of matrix products and bytes of memory, as the maker states them."""

    flops: float
    memory: float


# Peaks in bf16 without sparsity.
HARDWARE = {
    "h100": Hardware(989e12, 80e9),
    "h200": Hardware(989e12, 141e9),
    "a100": Hardware(312e12, 80e9),
    "rtx4090": Hardware(165e12, 24e9),
}
# The driver's own memory and what fragments between tensors.
USABLE = 0.95


@dataclass(frozen=True)
class Size:
    """What a model is made of, in numbers."""

    parameters: int
    embedding: int
    """Parameters of the embedding matrix, which is the output head as well if that is tied."""
    block: int
    """Parameters of one block."""
    matrices: int
    """Parameters that every token is multiplied with: all but norms and an embedding that is only looked up."""
    attention: int
    """FLOPs of attention's two products a token in training, without the projections."""
    attention_factor: int
    """12, or 6 where the kernel skips what causality hides."""

    @property
    def flops_per_token(self) -> int:
        """FLOPs of training one token: 6 a parameter that multiplies (2 forward, 4 backward), and attention."""
        return 6 * self.matrices + self.attention


def size(config: ModelConfig, vocab_size: int, context: int) -> Size:
    """Count parameters and FLOPs.

    Attention multiplies queries with keys and scores with values: 12 x n_layers x n_heads x head_dim x context FLOPs
    a token forward and backward (Chowdhery et al. 2022, PaLM, appendix B). Half of that is counted where the kernel
    skips what causality hides; an explicit mask, which ALiBi and a window need, makes it do all.
    """
    wide, narrow = config.n_heads * config.head_dim, config.kv_heads * config.head_dim
    embedding, head = vocab_size * config.dim, 0 if config.tie_embeddings else vocab_size * config.dim
    block_matrices = config.dim * (2 * wide + 2 * narrow + 3 * config.ffn_dim)
    block = block_matrices + 2 * config.dim
    factor = 6 if config.position != "alibi" and (config.window is None or config.window >= context) else 12
    return Size(
        parameters=embedding + head + config.n_layers * block + config.dim,
        embedding=embedding,
        block=block,
        matrices=(head or embedding) + config.n_layers * block_matrices,
        attention=factor * config.n_layers * wide * context,
        attention_factor=factor,
    )


def activation_bytes(config: ModelConfig, bf16: bool, checkpointing: bool = False) -> int:
    """Bytes a token that the forward pass keeps for the backward pass, without logits; eager, so compiling needs less.

    With activation checkpointing that is what goes into every block, and all of the one block that is made again.
    """
    wide, narrow, width = config.n_heads * config.head_dim, config.kv_heads * config.head_dim, 2 if bf16 else 4
    # Either norm keeps what it reads and its size in fp32. Attention keeps what it reads, its product of queries, keys
    # and values, and its result; SwiGLU what it reads, gate and up. In fp32, that is on a CPU, queries and keys are
    # turned in place and what follows gate and up is made again (rope.py, layers.py); otherwise those are kept as well,
    # and autocast casts what gate and up read once for each.
    kept = 2 * config.dim + (wide + 2 * narrow) + wide + 2 * config.ffn_dim
    if bf16:
        kept += config.dim + (wide + narrow) + 2 * config.ffn_dim
    norm = 4 * (config.dim + 1)
    block = 2 * norm + width * kept
    inputs = 4 * config.n_layers * config.dim
    return (inputs + block if checkpointing else config.n_layers * block) + norm + width * config.dim


def logit_bytes(vocab_size: int, bf16: bool) -> int:
    """Bytes a token at the peak of a compiled loss: logits, and in fp32 their log-softmax and the gradients of both."""
    return vocab_size * ((2 if bf16 else 4) + 3 * 4)


@dataclass(frozen=True)
class Plan:
    """What a training run needs; memory is bytes on each device."""

    size: Size
    tokens: int
    sequences: int
    """Sequences in one forward and backward pass of a device."""
    activations: int
    logits: int
    replicated: int
    """Weights, gradients, AdamW's two moments and, in bf16, the cast weights, with all of them on every device (DDP)."""
    sharded: int
    """The same with each device holding its share (FSDP) and, in bf16 or fp32, two blocks gathered."""
    checkpointing: bool
    """Whether activations are made a second time, for backward."""
    devices: int
    hardware: Hardware
    utilisation: float

    @property
    def passing(self) -> int:
        """Memory that comes and goes with every step."""
        return self.activations + self.logits

    @property
    def seconds(self) -> float:
        # A second forward pass is a third more of the work.
        work = self.tokens * self.size.flops_per_token * (4 / 3 if self.checkpointing else 1)
        return work / (self.devices * self.hardware.flops * self.utilisation)

    def sequences_that_fit(self, state: int) -> int:
        """The largest divisor of `sequences` for which there is room on top of `state`; 0 if there is none."""
        room = USABLE * self.hardware.memory - state
        divisors = (n for n in range(self.sequences, 0, -1) if self.sequences % n == 0)
        return next((n for n in divisors if n * self.passing <= room * self.sequences), 0)

    def verdict(self, state: int) -> str:
        """Whether a device has room on top of `state`, which is `replicated` or `sharded`, and what to change if not."""
        fitting = self.sequences_that_fit(state)
        if fitting == self.sequences:
            return "fits"
        if fitting:
            return f"too much; fits with train.micro_batch_size {fitting}"
        if self.devices > 1 and self.sequences_that_fit(self.sharded):
            return "too much; shard it with FSDP"
        return "too much; take more devices with FSDP, or a smaller model"

    def lines(self) -> dict[str, str]:
        """The plan in words, by what each line is about."""
        made, unit = self.size, self.hardware
        elsewhere = made.parameters - made.embedding
        lines = {
            "parameters": f"{made.parameters:,}, of them {made.embedding:,} in the embedding and {elsewhere:,} elsewhere",
            "FLOPs": f"{_count(made.flops_per_token)} a token of training: 6 x {made.matrices:,} parameters in "
            f"matrices + {made.attention_factor} x layers x heads x head_dim x context",
            "tokens": f"{_count(self.tokens)}, {self.tokens / made.parameters:.3g} a parameter",
            "time": f"{_in_units(self.seconds, {'hours': 3600, 'minutes': 60, 'seconds': 1}, 3)} at {self.utilisation:.0%} of {self.devices} x "
            f"{unit.flops / 1e12:.3g} TFLOP/s",
            "step": f"{_bytes(self.activations)} of activations and {_bytes(self.logits)} of logits a device, "
            f"for {self.sequences} sequences at a time",
        }
        states = {"replicated": self.replicated} | ({"sharded": self.sharded} if self.devices > 1 else {})
        for name, state in states.items():
            lines[name] = (
                f"{_bytes(state)} of weights, gradients and optimizer a device; with the step "
                f"{_bytes(state + self.passing)} of {_bytes(unit.memory)}: {self.verdict(state)}"
            )
        return lines


def _in_units(value: float, units: dict[str, float], digits: int) -> str:
    """`value` in the largest unit of which it has one, else in the last, to so many digits."""
    name, size = next((unit for unit in units.items() if value >= unit[1]), list(units.items())[-1])
    return f"{value / size:,.0f} {name}" if value >= 1000 * size else f"{value / size:.{digits}g} {name}"


def _count(number: float) -> str:
    return _in_units(number, {"G": 1e9, "M": 1e6, "k": 1e3}, 4)


def _bytes(size: float) -> str:
    return _in_units(size, {"GB": 1e9, "MB": 1e6, "kB": 1e3}, 3)


def plan(
    config: ModelConfig,
    vocab_size: int,
    context: int,
    *,
    steps: int,
    batch_size: int,
    micro_batch_size: int | None,
    checkpointing: bool,
    bf16: bool,
    devices: int,
    hardware: Hardware,
    utilisation: float,
) -> Plan:
    """What `steps` steps of `batch_size` sequences of `context` tokens need on `devices` equal devices.

    ValueError if the batch cannot be shared out among the devices.
    """
    if batch_size % devices:
        raise ValueError(f"train.batch_size {batch_size} cannot be shared by {devices} devices: choose a multiple")
    sequences = min(micro_batch_size or batch_size, batch_size // devices)
    counted, width = size(config, vocab_size, context), 2 if bf16 else 4
    state = 4 * 4 * counted.parameters
    return Plan(
        size=counted,
        tokens=steps * batch_size * context,
        sequences=sequences,
        activations=sequences * context * activation_bytes(config, bf16, checkpointing),
        logits=sequences * context * logit_bytes(vocab_size, bf16),
        replicated=state + (2 * counted.matrices if bf16 else 0),
        sharded=state // devices + (2 * width * max(counted.block, counted.embedding) if devices > 1 else 0),
        checkpointing=checkpointing,
        devices=devices,
        hardware=hardware,
        utilisation=utilisation,
    )
