"""The configuration of an architecture that this project has no class for, read by transformers.

Knows no layers. Whether the model can be run is found out when it is built (model.py).
"""

from collections.abc import Callable
from typing import Any

from nanovllm.checkpoints.model_config import check_size
from nanovllm.utils.validation import check, number, shown

# Model types that give transformers' own logits here, as a test shows. Others may keep a state, attend in
# another way, or do something beside attention that nobody would notice until the text is wrong.
VERIFIED = (
    "afmoe apertus arcee aria_text axk1 biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl cwm "
    "deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon flex_olmo flint "
    "gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 "
    "gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa "
    "granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 "
    "iquestcoder jais2 kolibri1 laguna llama mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 "
    "mistral mixtral modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 "
    "phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu"
).split()
# Why others are refused, as far as there is more to say than that no test shows them to be right.
REFUSED = {
    "it keeps a state of another kind than keys and values": (
        "bailing_hybrid bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe lfm3 "
        "mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text "
        "recurrent_gemma rwkv xlstm zamba zamba2"
    ).split(),
    "it is an encoder, or a decoder that needs one": (
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert "
        "data2vec-text electra ernie marian mbart megatron-bert musicgen musicgen_melody mvp pegasus plbart "
        "prophetnet rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm-roberta "
        "xlm-roberta-xl xmod"
    ).split(),
    "it attends to tokens that an index chooses": "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4".split(),
}
# Fields that files of a model type must not set, and why.
REFUSED_FIELDS = {
    ("bloom", "slow_but_exact"): "its products leave biases out",
    ("codegen", "auto_map"): "CodeGen2's own code may order queries, keys and values in another way",
}
# What its class computes, whatever these fields of files ask for.
FIXED = {
    "mpt": {
        "no_bias": True,
        "expansion_ratio": 4,
        "logit_scale": None,
        "norm_type": "low_precision_layernorm",
        "attn_type": "multihead_attention",
        "alibi": True,
        "qk_ln": False,
        "prefix_lm": False,
    }
}
# What a type calls the positions that a checkpoint is for, and how many they are if it does not say so.
CONTEXT_LIMITS = {"mpt": ("max_seq_len", None), "bloom": ("seq_length", 2048)}
# What transformers' classes read besides, as far as they do not list it themselves.
ROPE_KEYS = {"alpha", "short_factor", "long_factor", "short_mscale", "long_mscale"}
# Each has a default, or is checked, where all configurations are read.
SIZES = (
    "num_attention_heads num_key_value_heads head_dim hidden_size intermediate_size vocab_size "
    "num_hidden_layers tie_word_embeddings dtype"
).split()
KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}


def transformers_config(raw: dict[str, Any], check_rope: Callable[..., None] = lambda *settings: None) -> Any:
    """
    transformers' configuration object, of fields that have a list of architectures. Raises ValueError if it
    is none of a decoder that transformers knows. `check_rope` is called with all rotary settings, and those
    of them that are transformers' own.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, names = raw.get("model_type"), raw["architectures"]
    name = next(iter(names), None)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind))
    reason = next((why for why, kinds in REFUSED.items() if kind in kinds), "")
    if not reason and (known is None or not (name == known or model_type_decides(names))):
        raise ValueError(
            f"architecture {shown(name)} of model type {shown(kind)} is not known, neither here nor as a "
            "decoder of this version of transformers"
        )
    if int(__version__.split(".")[0]) < 5:  # with some of 4's the tokens are others
        raise ValueError(f"architecture {shown(name)} needs transformers 5 or newer, this is {__version__}")
    if kind not in VERIFIED:
        reason, known = reason or "no test shows it to be right", ", ".join(VERIFIED)
        raise ValueError(f"model type {kind!r} is not supported: {reason}; through transformers: {known}")
    for (model_type, field), why in REFUSED_FIELDS.items():
        if model_type == kind and raw.get(field):
            raise ValueError(f"{field}={shown(raw[field])} is not supported for model type {kind!r}: {why}")
    try:
        theirs = CONFIG_MAPPING[kind]
        # A copy, with floats where transformers has written {"__float__": "Infinity"}.
        config = theirs(**theirs._decode_special_floats(raw) | {"architectures": None})
    except Exception as error:  # whatever a foreign file makes of foreign code
        raise ValueError(f"transformers cannot read the configuration: {error!r:.300}") from error
    for name, value in FIXED.get(kind, {}).items():
        found = getattr(config if hasattr(config, name) else config.attn_config, name)
        check(found == value, f"{name} must be {value!r} for model type {kind!r}", found)
    known = ROPE_KEYS.union(getattr(config, "ignore_keys_at_rope_validation", None) or ())
    for settings in _rope_parameters(config):
        check_rope(settings, known)
        if (value := settings.pop("attn_factor", None)) is None:
            continue
        # transformers knows no factor beside YaRN's own, but one in its place.
        number(1e-6, 1e15)(value, "attn_factor")
        rope_type = settings.get("rope_type")
        if settings is not config.rope_parameters or rope_type != "yarn":
            raise ValueError(
                f"attn_factor is for rope_type 'yarn' in all layers alike, got {shown(rope_type)}"
            )
        settings["attention_factor"] = value * ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1]
    return config


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Rotary settings of all layers, or of each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    return [value for value in found.values() if isinstance(value, dict)] or [found]


def model_type_decides(architectures: list[Any]) -> bool:
    """
    Whether `model_type` alone says what a model is, as with transformers' AutoModel: there are no names, or
    only remote code's. One that transformers knows may be a class without an LM head.
    """
    import transformers

    return all(str(name).isidentifier() and not hasattr(transformers, str(name)) for name in architectures)


def read_transformers_config(raw: dict[str, Any], check_rope: Callable[..., None]) -> dict[str, Any]:
    """
    The sizes that the engine needs, by the names of this project. Raises ValueError naming what cannot be
    run; see `transformers_config`.
    """
    config = transformers_config(raw, check_rope)
    config.allow_global_per_layer_attribute_access = True  # sizes that layers may differ from
    found = {name: value for name in SIZES if (value := getattr(config, name, None))}
    # Some architectures have none. It is for the least size of files, and ranks must divide it.
    size = found.setdefault("intermediate_size", found.get("num_attention_heads", 1))
    if isinstance(size, list):  # one of each layer
        found["intermediate_size"] = min(size)
    found["max_position_embeddings"] = _context_limit(config)
    return found


def _context_limit(config: Any) -> int:
    """Positions that the checkpoint is for."""
    name, default = CONTEXT_LIMITS.get(config.model_type, ("max_position_embeddings", None))
    limit = getattr(config, name, default)
    check_size(limit, name)
    if others := set(getattr(config, "layer_types", None) or ()) - KINDS_OF_LAYERS:
        raise ValueError(f"layer_types {sorted(others)} are not supported, only {sorted(KINDS_OF_LAYERS)}")
    # Where a longer sequence turns all its keys by other angles, the cache could not keep them.
    for settings in _rope_parameters(config):
        if settings.get("rope_type") == "longrope":
            limit = min(limit, settings.get("original_max_position_embeddings", limit))
    return limit
