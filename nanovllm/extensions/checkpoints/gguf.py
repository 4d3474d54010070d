"""GGUF files: configuration, tokenizer and (mostly quantised) tensors of a model in one file.

Translates llama.cpp's names and layouts to Hugging Face's, so no other module knows them. gguf_file.py reads
the file's bytes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.extensions.checkpoints.gguf_file import GGUFTensor, read_file
from nanovllm.extensions.checkpoints.gguf_tokenizer import CONTROL, tokenizer_from_gguf
from nanovllm.extensions.checkpoints.library_errors import guarded, library_errors
from nanovllm.extensions.checkpoints.untrusted import checked_size

# In names of modules of which one tensor of a file holds all.
NUMBER = re.compile(r"\.norms\.\d+|(?<=\.experts)\.\d+")
BLOCK = re.compile(r"blk\.(\d{1,9})\.")
# They end a turn of a chat, whichever token the file calls the end of text.
ENDS_OF_TURN = {"<|im_end|>", "<end_of_turn>"}
# They do if they are control tokens: as text they may stand in any vocabulary.
CONTROL_ENDS = (
    "<|eot_id|> <|eom_id|> <|endoftext|> <|end|> <|end_of_text|> <|return|> <|call|> <EOT> _<EOT>".split()
)
FREQUENCY_FACTORS = "rope_freqs.weight"
# Behind "ARCHITECTURE.rope." in names of keys.
ROPE_KEYS = """
    dimension_count freq_base freq_base_swa scale_linear scaling.type scaling.factor scaling.attn_factor
    scaling.original_context_length scaling.finetuned scaling.yarn_ext_factor scaling.yarn_attn_factor
    scaling.yarn_beta_fast scaling.yarn_beta_slow
""".split()


class GGUFCheckpoint(Checkpoint):
    """
    `metadata` are the header's keys and values; `stored` are the tensors by llama.cpp's names. `models` are
    the classes of those that can be read.
    """

    def __init__(self, path: str, models: Collection[Any]):
        super().__init__(path)
        if find_spec("gguf") is None:
            raise ImportError("GGUF files need the gguf package: pip install nano-vllm[demo]")
        with library_errors(f"{path} is not a complete GGUF file"):
            self.metadata, self.stored = read_file(path)
        self.architecture = self.metadata.get("general.architecture")
        known = {model.gguf_name: model for model in models}
        if self.architecture not in [*known]:  # which may be no text
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not known; known ones: {', '.join(known)}"
            )
        self.model = known[self.architecture]
        self.changes = (self.placed,)

    def __reduce__(self) -> tuple:
        state = {"fill": self.fill, "changes": self.changes}
        return GGUFCheckpoint, (self.path, [self.model]), state  # maps the file anew

    def fields(self) -> dict[str, Any]:
        """As in a config.json."""
        number, stored = self._number, self.stored
        with library_errors(self.path):
            if (embedding := stored.get("token_embd.weight")) is None:
                raise ValueError("it has no matrix token_embd.weight")
            heads = number("attention.head_count")
            hidden_size = number("embedding_length")
            head_dim = number("attention.key_length", hidden_size // max(heads, 1))
            eps = self.metadata.get(f"{self.architecture}.attention.layer_norm_epsilon")
            eps = number("attention.layer_norm_rms_epsilon", eps, float)
            raw = {
                "model_type": self.model.model_type,
                "vocab_size": embedding.shape[0],
                "hidden_size": hidden_size,
                "intermediate_size": number("feed_forward_length"),
                "num_hidden_layers": self._num_layers(),
                "num_attention_heads": heads,
                "num_key_value_heads": number("attention.head_count_kv", heads),
                "head_dim": head_dim,
                "max_position_embeddings": number("context_length"),
                **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon"), eps),
                "rope_theta": number("rope.freq_base", 10000.0, float),
                "rope_scaling": self._rope_scaling(),
                "attention_bias": "blk.0.attn_q.bias" in stored,
                "mlp_bias": "blk.0.ffn_up.bias" in stored,
                "tie_word_embeddings": "output.weight" not in stored,
                # F16 is what converters write, also for models trained in bfloat16, whose range is larger.
                "dtype": None if embedding.dtype == torch.float16 else embedding.dtype,
                "quantization_config": self._quantisation() if self.fill is None else None,
            }
            own = self.model.read_gguf_fields(raw, number, stored)
            others = {  # what says it in another way
                "attention.value_length": {"v_head_dim"},
                "rope.dimension_count": {"qk_rope_head_dim", "partial_rotary_factor"},
            }
            for name, fields in others.items():
                if number(name, head_dim) != head_dim and not fields & own.keys():
                    raise ValueError(f"{name} must be {head_dim} like the keys' length")
            return raw | own

    def hf_config(self) -> ModelConfig:
        num_bytes = sum(tensor.encoded.nbytes for tensor in self.stored.values())
        return checked_size(self, super().hf_config(), num_bytes)

    def tokenizer(self) -> Any:
        with library_errors(f"{self.path}: cannot build the tokenizer"):
            return guarded(tokenizer_from_gguf(self.metadata), self.path)

    def named_eos(self) -> list[Any]:
        given = self.metadata.get
        found = [given(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        tokens, types = given("tokenizer.ggml.tokens"), given("tokenizer.ggml.token_type")
        if not isinstance(tokens, list):
            return found
        kinds = dict.fromkeys(tokens, CONTROL)
        if isinstance(types, list):
            kinds |= zip(tokens, types, strict=False)
        ends = {end for end in CONTROL_ENDS if kinds.get(end) == CONTROL}
        ends |= kinds.keys() & ENDS_OF_TURN
        if {"<|return|>", "<|call|>"} <= ends:  # in OpenAI's format another message may follow
            ends.discard("<|end|>")
        return found + [tokens.index(end) for end in sorted(ends)]

    def tensors(self) -> Iterator[GGUFTensor]:
        """By llama.cpp's names, see `placed`."""
        number, model = self._number, self.model
        heads = number("attention.head_count")
        rotated = {"attn_q": heads, "attn_k": number("attention.head_count_kv", heads)}
        unused = range(self._num_layers(), number("block_count"))
        for name, tensor in self.stored.items():
            block = BLOCK.match(name)
            part = name.split(".")[-2:][0]
            is_unused = block and int(block[1]) in unused
            if is_unused or name.startswith("rope_") or part == "attn_v_b":
                continue
            if part == "attn_k_b":
                tensor = joined_heads(tensor, self.stored.get(name.replace("_k_b", "_v_b")))
            elif part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:  # a row
                tensor = replace(tensor, shape=(1, *tensor.shape), encoded=tensor.encoded[None])
            elif model.gguf_rotates_neighbours and part in rotated:
                tensor = in_halves(tensor, rotated[part])
            elif model.gguf_added_to_norms and part.endswith("norm"):
                tensor = with_values(tensor, tensor[:].float() - model.gguf_added_to_norms)
            yield tensor

    def placed(
        self, tensors: Iterable[GGUFTensor], model: nn.Module, known: Collection[str]
    ) -> Iterator[GGUFTensor]:
        """
        Tensors by the `known` names that the model has for them, decoded where its weights are. Which of
        llama.cpp's names those are the gguf package says.
        """
        import gguf

        [code] = [code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture]
        names = gguf.get_tensor_name_map(code, self._num_layers())
        device = next(model.parameters()).device
        places = defaultdict(list)
        for name in known:
            plain = NUMBER.sub("", name).removesuffix("_bias")  # e_score_correction_bias
            places[names.get_name(plain, (".weight", ".bias"))].append(name)
        for tensor in tensors:
            name = tensor.name
            found = places.get(name) or places.get(name.rpartition(".")[0], [name])
            parts = [tensor]
            if NUMBER.search(found[0]) and len(tensor.shape) > 1:  # stacked
                parts = [replace(tensor, shape=tensor.shape[1:], encoded=each) for each in tensor.encoded]
            if len(parts) != len(found):
                raise ValueError(f"{tensor.file}: tensor {name} holds {len(parts)}, not {len(found)}")
            for part, place in zip(parts, found, strict=True):
                yield replace(part, name=place, device=device)

    def _num_layers(self) -> int:
        """Without the blocks at the end that predict tokens farther ahead."""
        return self._number("block_count") - self._number("nextn_predict_layers", 0)

    def _number(self, key: str, default: Any = None, kind: type = int) -> Any:
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if type(value) is not kind:
            raise ValueError(f"{key} must be one {kind.__name__}, got {value!r:.100}")
        # Stored as float32: 1e-6 must not come back as 9.999999974752427e-07.
        return float(str(np.float32(value))) if kind is float else value

    def _quantisation(self) -> dict[str, Any]:
        """Of the layers' matrices in all."""
        stored = self.stored.items()
        matrices = [each for name, each in stored if name.startswith("blk.") and len(each.shape) > 1]
        num_weights = sum(math.prod(matrix.shape) for matrix in matrices)
        num_bytes = sum(matrix.encoded.nbytes for matrix in matrices)
        experts = {each.quantisation.name for each in matrices if each.name.endswith("_exps.weight")}
        return {
            "quant_method": "gguf",
            "num_weights": num_weights,
            "bits_per_weight": 8 * num_bytes / max(num_weights, 1),
            "has_mxfp4_experts": experts == {"MXFP4"},
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        """As llama.cpp reads it: "linear" where only a factor is given, and 0 is no factor."""
        number = self._number
        prefix = f"{self.architecture}.rope."
        known = [prefix + key for key in (*ROPE_KEYS, *self.model.gguf_rope_keys)]
        for key in self.metadata:
            if key.startswith(prefix) and key not in known:
                raise ValueError(f"{key} is not supported")
        kind = self.metadata.get(f"{prefix}scaling.type", "linear")
        if kind not in ("none", "linear", "yarn"):
            raise ValueError(f"rope.scaling.type {kind!r} is not known; known: linear, yarn")
        factor = number("rope.scaling.factor", number("rope.scale_linear", 0.0, float), float) or 1.0
        # Written by converters, not read by llama.cpp. The second may say what follows from the factor.
        for name, own in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 0.1 * math.log(abs(factor)) + 1)):
            value = number(f"rope.scaling.{name}", 1.0, float)
            if value != 1 and not math.isclose(value, own, rel_tol=1e-5):
                raise ValueError(f"rope.scaling.{name} = {value} is not supported, only 1")
        scaling = {}
        if kind == "yarn":
            trained = number("rope.scaling.original_context_length", number("context_length"))
            scaling = {
                "rope_type": kind,
                "factor": factor,
                "original_max_position_embeddings": trained,
                "beta_fast": number("rope.scaling.yarn_beta_fast", 32.0, float),
                "beta_slow": number("rope.scaling.yarn_beta_slow", 1.0, float),
            }
        elif kind == "linear" and factor != 1:
            scaling = {"rope_type": kind, "factor": factor}
        if FREQUENCY_FACTORS in self.stored:  # how llama.cpp stores the scaling of Llama 3.1
            if kind == "yarn":
                raise ValueError(f"{FREQUENCY_FACTORS} beside YaRN is not supported")
            factors = self.stored[FREQUENCY_FACTORS][:] * scaling.get("factor", 1.0)
            scaling = {"rope_type": "frequency_factors", "factors": factors.tolist()}
        if (attn_factor := number("rope.scaling.attn_factor", 1.0, float)) != 1:
            scaling["attn_factor"] = attn_factor
        return scaling or None


def with_values(tensor: GGUFTensor, values: Tensor) -> GGUFTensor:
    """A tensor with other values than the file has, in float32."""
    return replace(
        tensor,
        shape=tuple(values.shape),
        quantisation=type(tensor.quantisation).F32,
        block_size=1,
        encoded=values.float().numpy().view(np.uint8),
    )


def joined_heads(keys: GGUFTensor, values: GGUFTensor | None) -> GGUFTensor:
    """
    Of DeepSeek's attention, the matrix that makes both of each head: keys [heads, rank, size], which are
    stored transposed, and values [heads, size, rank].
    """
    with library_errors(f"{keys.file}: tensor {keys.name} does not fit the one of values"):
        both = torch.cat((keys[:].float().transpose(1, 2), values[:].float()), dim=1)
    return replace(with_values(keys, both.flatten(0, 1)), name=keys.name.replace("_k_b", "_kv_b"))


def in_halves(tensor: GGUFTensor, heads: int) -> GGUFTensor:
    """
    A query or key projection, or its bias. llama.cpp rotates neighbouring rows of a head against each other
    and stores them so; here a head's first half is rotated against its second.
    """
    rows = tensor.shape[0]
    if rows % (2 * heads):
        return tensor  # the shape is wrong, which is an error when the tensor is loaded
    order = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if len(tensor.shape) == 1:
        return with_values(tensor, tensor[:][order])
    return replace(tensor, order=order)
