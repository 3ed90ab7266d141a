"""To and from the Llama layout of Hugging Face, which transformers, vLLM and llama.cpp read.

Two things differ. Their rotary pairs are the lanes (i, i + d/2) and ours (2i, 2i + 1), so rows of queries and keys
change places. And ours may scale its token embeddings, and has a norm eps of 1e-5. Scaling the whole residual stream
by s changes nothing if eps is s^2 times as large, so a Llama of another eps is ours with scaled embeddings.
"""

import json
import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from model.config import EMBEDDING_STD, ModelConfig, RopeConfig, ScalingConfig
from model.layers import NORM_EPS
from model.positions.scaling import attention_factor
from model.transformer import Transformer

# Our names and Llama's: weights of a block, settings of the shape, settings of each way of stretching RoPE.
BLOCK = {f"ffn.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
BLOCK |= {"attention.out": "self_attn.o_proj", "attention_norm.weight": "input_layernorm"}
BLOCK |= {"ffn_norm.weight": "post_attention_layernorm"}
SHAPE = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
SHAPE |= {"n_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size"}
STRETCHING: dict[str, tuple[str, ...]] = {"linear": (), "dynamic": (), "yarn": ("beta_fast", "beta_slow")}
STRETCHING |= {"llama3": ("high_freq_factor", "low_freq_factor")}
# What a Llama may have otherwise and our model has not.
FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
ABSENT = {"quantization_config": None, "partial_rotary_factor": 1}


def llama_config(config: ModelConfig, vocab_size: int, context: int) -> dict[str, Any]:
    """config.json of a model trained at `context` tokens; ValueError if Llama cannot express it."""
    rope, scaling = config.rope, config.rope.scaling
    asked = {"position": config.position, "rope.fraction": rope.fraction, "window": config.window}
    for (key, value), wanted in zip(asked.items(), ("rope", 1, None), strict=True):
        if value != wanted:
            raise ValueError(f"model.{key} is {value}, which Llama cannot express: only {wanted} can be exported")
    theta, trained = rope.theta, scaling.trained_length
    stretched: dict[str, Any] = {"rope_type": "default"}
    if scaling.kind == "ntk":  # another base by another name
        theta *= scaling.factor ** (config.head_dim / (config.head_dim - 2))
    elif scaling.kind != "none":
        stretched = {"rope_type": scaling.kind, "factor": scaling.factor}
        stretched |= {name: getattr(scaling, name) for name in STRETCHING[scaling.kind]}
        if STRETCHING[scaling.kind]:
            stretched["original_max_position_embeddings"] = trained
    values = {
        **FIXED,
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        **{theirs: getattr(config, ours) for ours, theirs in SHAPE.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        # What dynamic counts from; for the others, how far the model is meant to read.
        "max_position_embeddings": trained
        if scaling.kind == "dynamic"
        else max(context, round((trained or 0) * scaling.factor)),
        "rms_norm_eps": NORM_EPS,
        "tie_word_embeddings": _stays_tied(config),
        # As transformers 5 reads it, and as older readers do.
        "rope_parameters": {**stretched, "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": None if stretched["rope_type"] == "default" else stretched,
        "dtype": "float32",
    }
    if config.tie_embeddings and not _stays_tied(config):
        values["ropewalk"] = {"embedding_rms": config.embedding_rms}  # for load_llama, to tie them again
    return values


def _stays_tied(config: ModelConfig) -> bool:
    # Scaled embeddings and the unscaled head are two matrices.
    return config.tie_embeddings and config.embedding_rms == EMBEDDING_STD


def to_llama(model: Transformer) -> dict[str, Tensor]:
    """The weights under Llama's names and in its order of rows, on the CPU."""
    config, ours = model.config, model.state_dict()
    weights = {
        "model.embed_tokens.weight": ours["embedding.weight"] * (config.embedding_rms / EMBEDDING_STD),
        "model.norm.weight": ours["norm.weight"],
    }
    if not _stays_tied(config):
        weights["lm_head.weight"] = ours["embedding.weight" if config.tie_embeddings else "head.weight"]
    for number in range(config.n_layers):
        block, layer = f"blocks.{number}.", f"model.layers.{number}."
        for name, theirs in BLOCK.items():
            weights[f"{layer}{theirs}.weight"] = ours[f"{block}{name}"]
        heads = ours[f"{block}attention.qkv"].unflatten(0, (-1, config.head_dim))
        parts = heads.split((config.n_heads, config.kv_heads, config.kv_heads))
        for name, rows in zip("qkv", parts, strict=True):
            if name != "v":  # rows of a head as (pair, lane) become (lane, pair)
                rows = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            weights[f"{layer}self_attn.{name}_proj.weight"] = rows.flatten(0, 1)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def load_llama(folder: Path) -> tuple[Transformer, int]:
    """A Llama folder as our model in fp32, and its max_position_embeddings.

    What to_llama wrote comes back bit for bit, except that an untied model with scaled embeddings keeps them scaled.

    Raises:
        FileNotFoundError: weights as a pickle only.
        ValueError: files missing or damaged, another architecture, something that our model has not, or weights that
            do not fit.
    """
    path = folder / "config.json"
    # What LlamaConfig takes where a file says nothing.
    values = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False} | _read_json(path)
    values.setdefault("model_type", None)
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    for key, wanted in (FIXED | ABSENT).items():
        if values.get(key, wanted) != wanted:
            raise ValueError(f"{path} has {key} {values[key]}: only {wanted} can be imported")
    for key in (*SHAPE.values(), "vocab_size", "max_position_embeddings"):
        if not isinstance(values.get(key), int) or values[key] < 1:
            raise ValueError(f"{path} has {key} {values.get(key)}: it must be a whole number above 0")
    if not 0 < values["rms_norm_eps"] < 1:
        raise ValueError(f"{path} has rms_norm_eps {values['rms_norm_eps']}: only values above 0 can be imported")
    weights = _read_weights(folder)

    def take(name: str) -> Tensor:
        if name not in weights:
            raise ValueError(f"{folder} has no weight {name}, which its config.json calls for")
        return weights.pop(name).float()

    embedding, scale, rms = (
        take("model.embed_tokens.weight"),
        math.sqrt(NORM_EPS / values["rms_norm_eps"]),
        EMBEDDING_STD,
    )
    state, tied = {}, values["tie_word_embeddings"] and "lm_head.weight" not in weights
    if not tied:
        state["head.weight"] = take("lm_head.weight")
        ours = (values.get("ropewalk") or {}).get("embedding_rms", EMBEDDING_STD)
        if torch.equal(embedding, state["head.weight"] * (ours / EMBEDDING_STD)):
            embedding, rms, tied = state.pop("head.weight"), ours, True
    shape = {ours: values[theirs] for ours, theirs in SHAPE.items()}
    config = ModelConfig(tie_embeddings=tied, embedding_rms=rms * scale, rope=_read_rope(values, path), **shape)
    if values.get("head_dim") not in (None, config.head_dim):
        raise ValueError(f"{path} has head_dim {values['head_dim']}: only hidden_size / heads can be imported")
    model = Transformer(config, values["vocab_size"])
    state |= {"embedding.weight": embedding, "norm.weight": take("model.norm.weight")}
    try:
        for number in range(config.n_layers):
            block, layer = f"blocks.{number}.", f"model.layers.{number}."
            for name, theirs in BLOCK.items():
                tensor = take(f"{layer}{theirs}.weight")
                state[f"{block}{name}"] = tensor * scale if name in ("attention.out", "ffn.down") else tensor
            q, k, v = (
                take(f"{layer}self_attn.{part}_proj.weight").unflatten(0, (-1, config.head_dim)) for part in "qkv"
            )
            q, k = (rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for rows in (q, k))
            state[f"{block}attention.qkv"] = torch.cat((q, k, v)).flatten(0, 1)
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from error
    # Old folders store the frequencies too, which the base gives.
    if extra := [name for name in weights if not name.endswith("rotary_emb.inv_freq")]:
        raise ValueError(f"{folder} has a weight {extra[0]}, for which our model has no place")
    return model, values["max_position_embeddings"]


def _read_rope(values: dict[str, Any], path: Path) -> RopeConfig:
    """RoPE of a config.json, in the form of transformers 5 or an older one; ValueError if we have no such kind."""
    places = [values.get("rope_scaling") or {}, values.get("rope_parameters") or {}, values]
    rope = places[0] or places[1]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *STRETCHING):
        raise ValueError(f"{path} has rope_type {kind}: only default, {', '.join(STRETCHING)} can be imported")
    bases = {place["rope_theta"] for place in places if place.get("rope_theta") is not None}
    if len(bases) > 1:
        raise ValueError(f"{path} has two values of rope_theta, {' and '.join(map(str, sorted(bases)))}: leave one")
    theta = float(bases.pop()) if bases else RopeConfig.theta
    longest = values["max_position_embeddings"]
    given = {name: rope[name] for name in ("factor", *STRETCHING.get(kind, ())) if rope.get(name) is not None}
    if kind != "default" and "factor" not in given:
        raise ValueError(f"{path} has rope_type {kind} without a factor")
    trained = None
    if kind == "dynamic":
        trained = longest
    elif kind in ("yarn", "llama3"):
        original = "original_max_position_embeddings"
        trained = values.get(original) or rope.get(original) or longest
    scaling = ScalingConfig("none") if kind == "default" else ScalingConfig(kind, trained_length=trained, **given)
    ours = {"partial_rotary_factor": 1, "truncate": True, "mscale": None, "attention_factor": attention_factor(scaling)}
    for key, wanted in ours.items():
        if rope.get(key) is not None and not (wanted and math.isclose(rope[key], wanted, rel_tol=1e-6)):
            raise ValueError(f"{path} has {key} {rope[key]} for RoPE: only {wanted} can be imported")
    return RopeConfig(theta, scaling=scaling)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, whole or in shards; never a pickle."""
    paths, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if not paths[0].is_file() and index.is_file():
        paths = sorted({folder / name for name in _read_json(index).get("weight_map", {}).values()})
    elif pickled := [] if paths[0].is_file() else sorted(folder.glob("*.bin")):
        raise FileNotFoundError(f"{pickled[0]} is a pickle, which can run code: save the model as safetensors")
    weights: dict[str, Tensor] = {}
    for path in paths:
        try:
            weights |= safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is missing or damaged: {error}") from error
    return weights


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
