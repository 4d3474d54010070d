"""Whether a model is as large as its files: a small file could make us allocate any amount of memory."""

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.checkpoints.model_config import ModelConfig

LEAST_BYTES = 2**24  # smaller models do no harm


def checked_size(checkpoint: Checkpoint, config: ModelConfig, stored_bytes: int) -> ModelConfig:
    """The configuration. Raises ValueError if it is of a model that its files are too small for."""
    if checkpoint.fill is None and least_bits(config) > 8 * max(stored_bytes, LEAST_BYTES):
        raise ValueError(f"{checkpoint.source} describes a larger model than its files can hold")
    return config


def least_bits(config: ModelConfig) -> int:
    """Of all matrices, in the smallest format that they may have."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    # Rows of a layer's matrices that have `hidden_size` columns, or the other way round.
    layer_width = heads * config.head_dim + 3 * config.intermediate_size
    widths, experts = config.num_hidden_layers * layer_width, config.experts
    if experts:
        num_sparse = sum(map(experts.replaces_mlp, range(config.num_hidden_layers)))
        sparse_width = experts.num_experts * experts.moe_intermediate_size
        widths += num_sparse * 3 * (sparse_width - config.intermediate_size)
    bits = 8
    if format := config.quantization_config:
        # GGUF's smallest types take between one and two bits a weight.
        bits = 1 if format.get("quant_method") == "gguf" else 4
    return bits * config.hidden_size * (config.vocab_size + widths)
