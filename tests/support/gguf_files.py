"""GGUF files of small random models."""

from pathlib import Path

import gguf
import torch
from gguf_packer import encode
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file


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
    architecture = config.raw["model_type"].removesuffix("_text").replace("_moe", "moe")
    is_gemma = architecture == "gemma3"
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture, split_max_tensors=split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    if config.experts:
        writer.add_expert_count(config.experts.num_experts)
        writer.add_expert_used_count(config.experts.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.experts.moe_intermediate_size)
    if is_gemma:
        windows = {
            "sliding_window": max(config.windows),
            "sliding_window_pattern": config.windows.index(0) + 1,
        }
        metadata = {f"ARCH__attention__{name}": value for name, value in windows.items()} | metadata
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
    for name, tensor in [*stack_experts(tensors).items(), *extra_tensors]:
        module, kind = name.rsplit(".", 1)
        module = names.get_name(module) or module
        part = module.rpartition(".")[2]
        if architecture == "llama" and part in heads:
            tensor = interleave_halves(tensor, heads[part])
        if is_gemma and module.endswith("norm"):
            tensor = tensor + 1
        stored = kinds.get(part, kinds[""]) if tensor.dim() > 1 and part != "ffn_gate_inp" else "F32"
        type_ = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(f"{module}.{kind}", encode(tensor, stored), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.glob("model*.gguf"))


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts' matrices as one tensor [experts, rows, columns]."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    found = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".experts.")
        if not rest:
            found[name] = tensor
            continue
        number, _, matrix = rest.partition(".")
        stacks.setdefault(f"{layer}.experts.{matrix}", {})[int(number)] = tensor
    stacked = {name: torch.stack([its[i] for i in range(len(its))]) for name, its in stacks.items()}
    return found | stacked


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
