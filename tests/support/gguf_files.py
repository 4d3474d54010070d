"""GGUF files of small random models."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf_packer import encode
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file

from nanovllm.assembly import get_model_class
from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.extensions.checkpoints.gguf_file import GGUFTensor
from nanovllm.utils.loader import find_places

NAMES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "mistral": "llama"}
NAMES |= {"cohere": "command-r", "olmo3": "olmo2"}
# Whose query and key projections have the order of rows that llama.cpp rotates.
INTERLEAVED = "llama", "granite", "smollm3"
# Fields of config.json that are keys of some architectures.
KEYS = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}


def interleave_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k: of each head, both halves' first rows, second rows, ..."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_gguf(
    folder: Path, quantisation: str | dict[str, str] = "F32", extra_tensors=(), split: int = 0, **metadata
) -> Path:
    """
    The checkpoint of a folder as llama.cpp would store it, its matrices quantised: all of them as one type,
    or each as said for the last part of its name, the others as for "". `split`: the most tensors of a file;
    the first of several is returned.
    """
    kinds = {"": quantisation} if isinstance(quantisation, str) else quantisation
    config = open_checkpoint(folder).hf_config()
    raw = json.loads((folder / "config.json").read_text())
    architecture = NAMES.get(raw["model_type"], raw["model_type"])
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture, split_max_tensors=split)
    found = metadata_of_config(raw, config)
    metadata = {f"ARCH__{key}": value for key, value in found.items() if value is not None} | metadata
    for key, value in metadata.items():
        key = key.replace("__", ".").replace("ARCH", architecture)
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    codes = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(codes[architecture], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    if architecture == "gpt-oss":
        tensors = dict(taken_apart(tensors))
    for name, tensor in [*stack(tensors).items(), *rope_factors(raw), *extra_tensors]:
        module, kind = name.rsplit(".", 1)
        module = names.get_name(module) or module
        part = module.rpartition(".")[2]
        if architecture in INTERLEAVED and part in heads:
            tensor = interleave_halves(tensor, heads[part])
        if architecture.startswith("gemma") and module.endswith("norm"):
            tensor = tensor + 1
        is_matrix = tensor.dim() > 1 and kind == "weight" and not part.endswith(("gate_inp", "norm"))
        stored = kinds.get(part, kinds[""]) if is_matrix else "F32"
        type_ = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(f"{module}.{kind}", encode(tensor, stored), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.glob("model*.gguf"))


def taken_apart(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """gpt-oss's experts with gates and ups apart, and outputs in front of inputs."""
    for name, tensor in tensors.items():
        name, is_bias, _ = name.partition("_bias")
        kind = "bias" if is_bias else "weight"
        if ".experts." not in name:
            yield (f"{name}.weight" if name.endswith("sinks") else name), tensor
            continue
        tensor = tensor if is_bias else tensor.transpose(1, 2).contiguous()
        if name.endswith("down_proj"):
            yield f"{name}.{kind}", tensor
        else:
            for start, part in enumerate(("gate", "up")):
                yield f"{name.replace('gate_up', part)}.{kind}", tensor[:, start::2].contiguous()


def metadata_of_config(raw: dict[str, Any], config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a config.json, behind the name of the architecture."""
    kind, rope = raw["model_type"], raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": raw.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": raw.get("layer_norm_eps", raw.get("norm_epsilon")),
        "rope.freq_base": float(rope.get("rope_theta", raw.get("rope_theta"))),
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1)),
    }
    if raw.get("head_dim"):
        found |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    if config.experts:
        found["expert_count"] = config.experts.num_experts
        found["expert_used_count"] = config.experts.num_experts_per_tok
        found["expert_feed_forward_length"] = config.experts.moe_intermediate_size
    if not kind.startswith("qwen"):
        values = {key: raw.get(field) for field, key in KEYS.items() if raw.get(field) is not None}
        found |= {key: value if "window" in key else float(value) for key, value in values.items()}
    if kind == "gemma3_text":
        found["attention.sliding_window_pattern"] = config.windows.index(0) + 1
    if kind == "olmo3":
        found["attention.sliding_window_pattern"] = ["sliding" in each for each in raw["layer_types"]]
    if kind == "phi3":
        found["attention.sliding_window"] = raw["sliding_window"] or 0
        found["rope.scaling.original_context_length"] = raw["original_max_position_embeddings"]
        if rope["rope_type"] == "longrope":
            trained = raw["original_max_position_embeddings"]
            scale = math.log(raw["max_position_embeddings"] / trained) / math.log(trained)
            found["rope.scaling.attn_factor"] = math.sqrt(1 + scale)
    return found


def rope_factors(raw: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Tensors with the numbers that config.json has for longer contexts (Phi-3)."""
    rope = raw.get("rope_parameters") or {}
    names = [name for name in ("long_factor", "short_factor") if name in rope]
    return [(f"rope_factors_{name[:-7]}.weight", torch.tensor(rope[name])) for name in names]


def placed(checkpoint: Checkpoint) -> Iterator[GGUFTensor]:
    """The tensors of a file by the names that a model's class has for them."""
    config = checkpoint.hf_config()
    model = get_model_class(config)(config)
    return checkpoint.placed(checkpoint.tensors(), model, find_places(model))


def stack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts' matrices as one tensor [experts, rows, columns], all heads' norms as one [heads, size]."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.search(r"\.(experts|norms)\.(\d+)", name)
        name = name if found is None else name.replace(found[0], ".experts" * (found[1] == "experts"))
        stacks.setdefault(name, {})[-1 if found is None else int(found[2])] = tensor
    return {
        name: its[-1] if -1 in its else torch.stack([its[i] for i in range(len(its))])
        for name, its in stacks.items()
    }


def metadata_of(kind: str, tokens: list[str], types: list[int] | None = None, **others) -> dict:
    types = types or [1] * len(tokens)
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in dict(model=kind, tokens=tokens, token_type=types, **others).items()
    }


def byte_level_metadata(pre: str, **others) -> dict:
    """Every byte, pairs and triples of "1", and one special token."""
    from nanovllm.extensions.checkpoints.made_up import toy_tokenizer

    vocabulary = toy_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)[:256] + ["11", "111", "<|im_end|>"]
    return metadata_of("gpt2", tokens, [1] * 258 + [3], merges=["1 1", "11 1"], pre=pre, **others)
