"""The text part of a checkpoint whose model also reads images: its configuration and its tensors.

Such a file has the text model's fields in `text_config` (older ones of Qwen2-VL have them at the top), and
its tensors behind a prefix, `language_model.model.` in older files and `model.language_model.` in newer ones.
What reads images is skipped unread. Positions of texts are the same in all three parts of a multimodal
rotation (mRoPE), which then is the plain one.
"""

import functools
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from nanovllm.extensions.checkpoints.names import MadeTensor, renamed
from nanovllm.utils.validation import check, is_number

GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
# By the `model_type` in `text_config`: the class and the `model_type` of such a model alone, and fields that
# files leave out.
TEXTS = {
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3_text", GEMMA3),
    "gemma3n_text": ("Gemma3nForCausalLM", "gemma3n_text", {}),
    "llama4_text": ("Llama4ForCausalLM", "llama4_text", {}),
    "ministral3": ("Ministral3ForCausalLM", "ministral3", {}),
    "mistral": ("MistralForCausalLM", "mistral", {}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", "qwen2", {}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", "qwen2", {}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", "qwen3", {}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", "qwen3_moe", {"norm_topk_prob": True}),
}
# By the class of the whole model: the `model_type` of its text part where the file does not say it.
WHOLES = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Llama4ForConditionalGeneration": "llama4_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
}
TOWERS = """
    visual vision_tower vision_model multi_modal_projector embed_vision audio_tower embed_audio
""".split()
# How names of the text part begin in files. In a pattern for names, the dots may be escaped.
PREFIX = re.compile(r"model\\?\.language_model|language_model\\?\.model")


def open_text_part(checkpoint: Any) -> None:
    """Have a checkpoint be that of its text part, if its model reads images as well. Raises ValueError."""
    config = checkpoint.config
    whole = next((name for name in WHOLES if config.get("architectures") == [name]), None)
    if whole is None:
        return
    checkpoint.config = text_fields(checkpoint.source, config, WHOLES[whole])
    warnings.warn(f"{checkpoint.path}: of a {whole} the text part is read, and no images", stacklevel=2)
    change = functools.partial(text_tensors, hidden_size=checkpoint.config.get("hidden_size"))
    checkpoint.changes = (change, *checkpoint.changes)


def text_fields(source: str, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """
    The configuration of the text part, in place of one of the whole. `kind` is the text's `model_type` unless
    it has one. Raises ValueError naming the source.
    """
    text = config.get("text_config") or {}
    check(isinstance(text, dict), f"{source}: text_config must be an object", text)
    kind = text.get("model_type", kind)
    check(kind in [*TEXTS], f"{source}: model_type of text_config must be one of {[*TEXTS]}", kind)
    architecture, model_type, left_out = TEXTS[kind]
    fields = left_out | config | text | {"model_type": model_type, "architectures": [architecture]}
    for part in ("text_config", "vision_config", "audio_config"):
        fields.pop(part, None)
    if "tie_word_embeddings" in config:  # the text's may be no more than a default
        fields["tie_word_embeddings"] = config["tie_word_embeddings"]
    for name in {"rope_scaling", "rope_parameters"} & fields.keys():
        fields[name] = _plain_rotation(fields[name], fields.get("max_position_embeddings"))
    if isinstance(quantisation := fields.get("quantization_config"), dict):
        fields["quantization_config"] = {key: _text_names(value) for key, value in quantisation.items()}
    return fields


def _plain_rotation(rope: Any, num_positions: Any) -> Any:
    """
    Rotary settings of a text alone, perhaps of each kind of layer. `max_position_embeddings` counts the
    positions that a factor adds.
    """
    if not isinstance(rope, dict):
        return "default" if rope == "mrope" else rope
    found = {name: _plain_rotation(value, num_positions) for name, value in rope.items()}
    factor = rope.get("factor")
    if is_number(factor, float, 1) and is_number(num_positions, int):
        found.setdefault("original_max_position_embeddings", int(num_positions / factor))
    return found


def _text_names(value: Any) -> Any:
    """Lists of layers that are not quantised, by the names that they have in the text part."""
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        return value
    return [own for name in value if (own := text_name(name)) is not None]


def text_name(name: str) -> str | None:
    """
    The name that a tensor or a layer, or a pattern for names, has in the text part; None if it belongs to
    what reads images.
    """
    if name.removeprefix("model.").partition(".")[0] in TOWERS:
        return None
    return PREFIX.sub("model", name).replace("language_model.lm_head.", "lm_head.")


def text_tensors(
    tensors: Iterable[Any], model: nn.Module, known: Collection[str], hidden_size: int
) -> Iterator[Any]:
    """Those of the text part, by its names."""
    for tensor in tensors:
        name = text_name(tensor.name)
        if name is None:
            continue
        if ".mlp.experts." in name and len(tensor.shape) == 3:
            yield from _experts(tensor, name, hidden_size)
        else:
            yield renamed(tensor, name)


def _experts(tensor: Any, name: str, hidden_size: int) -> Iterator[MadeTensor]:
    """Of a tensor with a matrix of each expert, [experts, inputs, outputs] or [experts, outputs, inputs]."""
    folder, _, kind = name.rpartition(".")
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
    matrices = tensor[...]  # a view of the mapped file
    if matrices.shape[1 if len(parts) == 2 else 2] == hidden_size:
        matrices = matrices.mT
    for expert, matrix in enumerate(matrices):
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=False):
            yield MadeTensor(tensor.file, f"{folder}.{expert}.{part}.weight", rows)
