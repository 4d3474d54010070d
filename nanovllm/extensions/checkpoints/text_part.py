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
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nanovllm.extensions.checkpoints.names import renamed
from nanovllm.utils.validation import check, is_number

GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
# By the `model_type` in `text_config`: the class and the `model_type` of such a model alone, and fields that
# files leave out.
TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3_text", GEMMA3),
    "gemma3n_text": ("Gemma3nForCausalLM", "gemma3n_text", {}),
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
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
}
# The last is a part of a name only in front of the head, which stands beside the other parts.
PREFIX = re.compile(r"(model\.language_model|language_model\.model|model|language_model(?=\.lm_head))\.")
TOWERS = """
    visual vision_tower vision_model multi_modal_projector embed_vision audio_tower embed_audio
""".split()
# In a pattern for names, the dots of a prefix may be escaped.
PREFIX_IN_PATTERN = re.compile(r"model\\?\.language_model|language_model\\?\.model")


def text_fields(config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration of the text part, in place of one of the whole; None if that is of a text alone."""
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and str(names[0]) in WHOLES):
        return None
    text = config.get("text_config") or {}
    check(isinstance(text, dict), "text_config must be an object", text)
    kind = text.get("model_type", WHOLES[names[0]])
    is_known = isinstance(kind, str) and kind in TEXTS
    check(is_known, f"model_type of text_config must be one of {[*TEXTS]}", kind)
    architecture, model_type, left_out = TEXTS[kind]
    fields = left_out | config | text | {"model_type": model_type, "architectures": [architecture]}
    for part in ("text_config", "vision_config", "audio_config"):
        fields.pop(part, None)
    if "tie_word_embeddings" in config:  # the text's may be no more than a default
        fields["tie_word_embeddings"] = config["tie_word_embeddings"]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := fields.get(name), dict):
            fields[name] = _plain_rotation(rope, fields.get("max_position_embeddings"))
    if isinstance(quantisation := fields.get("quantization_config"), dict):
        fields["quantization_config"] = {key: _text_names(value) for key, value in quantisation.items()}
    return fields


def _plain_rotation(rope: dict[str, Any], num_positions: Any) -> dict[str, Any]:
    """Rotary settings of a text alone. `max_position_embeddings` counts the positions that a factor adds."""
    found = {}
    for name, value in rope.items():
        if isinstance(value, dict):  # of one kind of layer
            value = _plain_rotation(value, num_positions)
        found[name] = "default" if value == "mrope" else value
    factor = rope.get("factor")
    if is_number(factor, float, 1) and is_number(num_positions, int):
        found.setdefault("original_max_position_embeddings", int(num_positions / factor))
    return found


def _text_names(value: Any) -> Any:
    """Lists of layers that are not quantised, by the names that they have in the text part."""
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        return value
    found = []
    for name in value:
        if name.startswith("re:"):
            found.append(PREFIX_IN_PATTERN.sub("model", name))
        elif (renamed_to := text_name(name)) is not None:
            found.append(renamed_to)
    return found


def text_name(name: str) -> str | None:
    """A tensor's or a layer's name in the text part; None if it belongs to what reads images."""
    prefix = PREFIX.match(name)
    rest = name[prefix.end() :] if prefix else name
    if rest.partition(".")[0] in TOWERS:
        return None
    return f"model.{rest}" if prefix and not rest.startswith("lm_head") else rest


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


def _experts(tensor: Any, name: str, hidden_size: int) -> Iterator["ExpertsMatrix"]:
    """Of a tensor with a matrix of each expert, [experts, inputs, outputs] or [experts, outputs, inputs]."""
    folder, _, kind = name.rpartition(".")
    num_experts, *shape = tensor.shape
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
    has_inputs_first = shape[0 if len(parts) == 2 else 1] == hidden_size
    inputs, outputs = shape if has_inputs_first else shape[::-1]
    rows = outputs // len(parts)
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            place = slice(i * rows, (i + 1) * rows)
            own = f"{folder}.{expert}.{part}.weight"
            yield ExpertsMatrix(tensor, tensor.file, own, (rows, inputs), expert, place, has_inputs_first)


@dataclass
class ExpertsMatrix:
    """One expert's matrix [outputs, inputs]: some rows of a larger one, in a tensor of all experts'."""

    stored: Any
    file: str
    name: str
    shape: tuple[int, int]
    expert: int
    rows: slice
    has_inputs_first: bool

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    def __getitem__(self, index: Any) -> Tensor:
        if self.has_inputs_first:
            return self.stored[self.expert, :, self.rows].t()[index]
        return self.stored[self.expert, self.rows][index]


def open_text_part(checkpoint: Any) -> None:
    """Have a checkpoint be that of its text part, if its model reads images as well. Raises ValueError."""
    whole = checkpoint.config
    try:
        fields = text_fields(whole)
    except ValueError as error:
        raise ValueError(f"{checkpoint.source}: {error}") from None
    if fields is None:
        return
    message = f"{checkpoint.path}: of a {whole['architectures'][0]} the text part is read, and no images"
    warnings.warn(message, stacklevel=2)
    checkpoint.config = fields
    checkpoint.changes = (
        functools.partial(text_tensors, hidden_size=fields.get("hidden_size")),
        *checkpoint.changes,
    )
