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
NAMES |= {"cohere": "command-r", "olmo3": "olmo2", "mixtral": "llama", "qwen2_moe": "qwen2moe"}
NAMES |= {"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe": "glm4moe"}
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
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
FLOATS = "capping", "scale", "scaling", "multiplier", "factor"


def interleave_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k: of each head, both halves' first rows, second rows, ..."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_gguf(
    folder: Path,
    quantisation: str | dict[str, str] = "F32",
    extra_tensors=(),
    split: int = 0,
    is_newest: bool = True,
    **metadata,
) -> Path:
    """
    The checkpoint of a folder as llama.cpp would store it, its matrices quantised: all of them as one type,
    or each as said for the last part of its name, the others as for "". `split`: the most tensors of a file;
    the first of several is returned. `is_newest`: whether DeepSeek's keys and values are two matrices.
    """
    kinds = {"": quantisation} if isinstance(quantisation, str) else quantisation
    config = open_checkpoint(folder).hf_config()
    raw = json.loads((folder / "config.json").read_text())
    architecture = NAMES.get(raw["model_type"], raw["model_type"])
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture, split_max_tensors=split)
    found = metadata_of_config(raw, config)
    if not is_newest:
        found |= {
            f"attention.{kind}_length": found.pop(f"attention.{kind}_length_mla") for kind in ("key", "value")
        }
        found["attention.head_count_kv"] = found["attention.head_count"]
    metadata = {f"ARCH__{key}": value for key, value in found.items() if value is not None} | metadata
    for key, value in metadata.items():
        key = key.replace("__", ".").replace("ARCH", architecture)
        add = {
            bool: writer.add_bool,
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
    tensors = dict(converted(tensors, raw, is_newest))
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


def converted(
    tensors: dict[str, torch.Tensor], raw: dict[str, Any], is_newest: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of mixtures of experts: other names, a row as a vector, DeepSeek's keys and values apart."""
    for name, tensor in tensors.items():
        name = name.replace("correction_bias", "correction.bias")
        if name.endswith("kv_b_proj.weight") and is_newest:
            size, rank = raw["qk_nope_head_dim"], raw["kv_lora_rank"]
            heads = tensor.view(raw["num_attention_heads"], size + raw["v_head_dim"], rank)
            yield name.replace("kv_b", "k_b"), heads[:, :size].transpose(1, 2).contiguous()
            yield name.replace("kv_b", "v_b"), heads[:, size:].contiguous()
        else:
            yield name, tensor[0] if name.endswith("shared_expert_gate.weight") else tensor


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
        "attention.layer_norm_rms_epsilon": raw.get("rms_norm_eps", raw.get("layer_norm_epsilon")),
        "attention.layer_norm_epsilon": raw.get("layer_norm_eps", raw.get("norm_epsilon")),
        "rope.freq_base": float(rope.get("rope_theta", raw.get("rope_theta"))),
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1)),
    }
    if raw.get("head_dim"):
        found |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    for field, key in KEYS.items():
        if raw.get(field) is not None and not (kind.startswith("qwen") and "window" in key):
            found[key] = float(raw[field]) if field.endswith(FLOATS) else raw[field]
    if kind.startswith("deepseek"):
        found["attention.head_count_kv"] = 1
        found["attention.key_length"] = raw["kv_lora_rank"] + raw["qk_rope_head_dim"]
        found["attention.value_length"] = raw["kv_lora_rank"]
        found["attention.key_length_mla"] = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
        found["attention.value_length_mla"] = raw["v_head_dim"]
        found["rope.dimension_count"] = raw["qk_rope_head_dim"]
        found["expert_gating_func"] = 2 if kind == "deepseek_v3" else 1
    if kind == "gemma3_text":
        found["attention.sliding_window_pattern"] = config.windows.index(0) + 1
    if kind == "olmo3":
        found["attention.sliding_window_pattern"] = ["sliding" in each for each in raw["layer_types"]]
    if rope.get("rope_type") == "yarn" and kind != "gpt_oss":
        found["rope.scaling.type"], found["rope.scaling.factor"] = "yarn", float(rope["factor"])
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "mscale_all_dim" in rope:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
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
