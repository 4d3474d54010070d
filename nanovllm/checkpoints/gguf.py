"""GGUF files: configuration, tokenizer and (mostly quantised) tensors of a model in one file.

Translates llama.cpp's names and layouts to Hugging Face's, so no other module knows the format. The header
is read here, with every length checked against the file. Tensors stay quantised in the mapped file until they
are sliced; gguf_blocks.py decodes the usual types, the `gguf` package the others. Source: the specification,
docs/gguf.md of ggml.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.checkpoints.gguf_blocks import TYPES, Groups, decode_groups, decode_values
from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.checkpoints.tokenizer import tokenizer_errors, tokenizer_from_gguf
from nanovllm.checkpoints.untrusted import check_room

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURES["gemma3"] = "Gemma3ForCausalLM"
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_MODULES = LAYER_MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# They end a turn of a chat, whichever token the file calls the end of text.
ENDS_OF_TURN = ("<|im_end|>", "<end_of_turn>")
FREQUENCY_FACTORS = "rope_freqs.weight"
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

# Number of the type in the file -> its code in `struct` and numpy.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Of a header; several times what the largest vocabularies need.
MAX_ITEMS = 2**21
MAX_HEADER_BYTES = 2**28


class GGUFCheckpoint(Checkpoint):
    """`metadata` are the header's keys and values; `stored` are the tensors by llama.cpp's names."""

    def __init__(self, path: str, random_weights: bool = False):
        try:
            import gguf
        except ImportError as error:
            raise ImportError("GGUF files need the gguf package: pip install nano-vllm[demo]") from error
        super().__init__(path, random_weights)
        try:
            header = _Header(path, gguf)
        except (ValueError, KeyError, OverflowError, struct.error) as error:
            raise ValueError(f"{path} is not a complete GGUF file: {error}") from error
        self.metadata, self.stored = header.metadata, header.tensors
        self.architecture = self.metadata.get("general.architecture")
        if self.architecture not in [*ARCHITECTURES]:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{path}: architecture {self.architecture!r} is not known; known ones: {known}")

    def __reduce__(self) -> tuple:
        return GGUFCheckpoint, (self.path, self.random_weights)  # maps the file anew

    def hf_config(self, model_impl: str = "auto") -> ModelConfig:
        heads, hidden_size = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden_size // max(heads, 1))
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._number(name, head_dim) != head_dim:
                raise ValueError(f"{self.path}: {name} must be {head_dim} like the keys' length")
        embedding = self.stored.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"{self.path} has no matrix token_embd.weight")
        raw = {
            "model_type": self.architecture,
            "architectures": [ARCHITECTURES[self.architecture]],
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", kind=float),
            "rope_theta": self._number("rope.freq_base", 10000.0, kind=float),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": "blk.0.attn_q.bias" in self.stored,
            "mlp_bias": "blk.0.ffn_up.bias" in self.stored,
            "tie_word_embeddings": "output.weight" not in self.stored,
            # F16 is what converters write, also for models trained in bfloat16, whose range is larger.
            "dtype": None if embedding.dtype == torch.float16 else embedding.dtype,
            "quantization_config": None if self.random_weights else {"quant_method": "gguf"},
        }
        if self.architecture == "gemma3":
            raw |= self._gemma_settings(raw)
        config = ModelConfig.from_dict(self.path, raw, model_impl)
        if not self.random_weights:  # the smallest quantisations take between one and two bits a weight
            check_room(self.path, config, os.path.getsize(self.path), bits=1)
        return config

    def tokenizer(self) -> Any:
        with tokenizer_errors(f"{self.path}: cannot build the tokenizer"):
            return tokenizer_from_gguf(self.metadata)

    def named_eos(self) -> list[Any]:
        found = [self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        tokens = self.metadata.get("tokenizer.ggml.tokens", [])
        if isinstance(tokens, list):
            found += [tokens.index(end) for end in ENDS_OF_TURN if end in tokens]
        return found

    def tensors(self) -> Iterator["GGUFTensor"]:
        heads = self._number("attention.head_count")
        rotated = {"attn_q": heads, "attn_k": self._number("attention.head_count_kv", heads)}
        is_gemma = self.architecture == "gemma3"
        modules = GEMMA_MODULES if is_gemma else LAYER_MODULES
        for stored_name, tensor in self.stored.items():
            if stored_name == FREQUENCY_FACTORS:
                continue
            module, _, kind = stored_name.rpartition(".")
            name, order = MODULES.get(module, module), None
            block, _, rest = module.partition(".")
            layer, _, part = rest.partition(".")
            if block == "blk" and part in modules:
                name = f"model.layers.{layer}.{modules[part]}"
                if self.architecture == "llama" and part in rotated:
                    order = _rotary_order(tensor.shape[0], rotated[part])
            added = 1.0 if is_gemma and name.endswith("norm") else 0.0
            yield replace(tensor, name=f"{name}.{kind}", order=order, added=added, device=self.device)

    def _number(self, key: str, default: Any = None, kind: type = int) -> Any:
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if type(value) is not kind:
            raise ValueError(f"{self.path}: {key} must be one {kind.__name__}, got {value!r:.100}")
        # Stored as float32: 1e-6 must not come back as 9.999999974752427e-07.
        return value if kind is int else float(str(np.float32(value)))

    def _gemma_settings(self, raw: dict[str, Any]) -> dict[str, Any]:
        window = self._number("attention.sliding_window", 0)
        divisor = raw["head_dim"]
        if raw["num_hidden_layers"] == 62:  # the model of 27b, which is not told in any other way
            divisor = raw["hidden_size"] // max(raw["num_attention_heads"], 1)
        return {
            "model_type": "gemma3_text",
            "sliding_window": window or None,
            "sliding_window_pattern": self._number("attention.sliding_window_pattern", 6) if window else 1,
            "rope_local_base_freq": self._number("rope.freq_base_swa", 10000.0, kind=float),
            "query_pre_attn_scalar": divisor,
            "final_logit_softcapping": self.metadata.get("gemma3.final_logit_softcapping"),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        if FREQUENCY_FACTORS in self.stored:  # how llama.cpp stores the scaling of Llama 3.1
            factors = self.stored[FREQUENCY_FACTORS][:].tolist()
            return {"rope_type": "frequency_factors", "factors": factors}
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self.path}: rope.scaling.type {kind!r} is not known; known: linear, yarn")
        scaling = {"rope_type": kind, "factor": self._number("rope.scaling.factor", kind=float)}
        if kind == "yarn":
            original = self._number("rope.scaling.original_context_length", self._number("context_length"))
            scaling["original_max_position_embeddings"] = original
            for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
                scaling[name] = self._number(f"rope.scaling.yarn_{name}", default, kind=float)
        return scaling


@dataclass
class GGUFTensor:
    """
    One tensor in the mapped file. Slices are torch tensors, of the stored dtype or, if quantised, float32 on
    `device`. Only the rows and, in each row, the blocks that a slice touches are read.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    quantisation: Any  # a gguf.GGMLQuantizationType
    block_size: int  # values that are quantised together
    encoded: np.ndarray  # uint8 [..., bytes of a row]
    order: np.ndarray | None = None  # where each row is stored
    added: float = 0.0  # what the converter added to the values of a vector
    device: torch.device = Checkpoint.device

    @property
    def dtype(self) -> torch.dtype | None:
        """None if the tensor is quantised."""
        return PLAIN_DTYPES.get(self.quantisation.name)

    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor:
        if len(self.shape) != 2:
            whole = self._decode(self.encoded)
            if self.added:  # exact where the sum was made in float32
                whole = whole.float() - self.added
            return (whole if self.order is None else whole[self.order])[index]
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = columns.indices(self.shape[1])
        encoded = self._touched(rows, start, stop)
        if not len(encoded):  # the last of many ranks may have no row of a small vocabulary
            return torch.empty(0, stop - start)
        skipped = start // self.block_size * self.block_size
        return self._decode(encoded)[:, start - skipped : stop - skipped]

    def groups(self, rows: slice, columns: slice) -> Iterator[Groups]:
        """
        The codes and scales of these rows, some rows after the others, and of these columns, which are whole
        groups. Only for types that gguf_blocks.py knows.
        """
        start, stop, _ = columns.indices(self.shape[1])
        skipped = start // self.block_size * self.block_size
        for each in decode_groups(self._touched(rows, start, stop), self.quantisation.name, self.device):
            size = each.codes.shape[-1]
            yield each.cut(slice((start - skipped) // size, (stop - skipped) // size))

    def _touched(self, rows: slice, start: int, stop: int) -> np.ndarray:
        """The blocks of a matrix in which these rows and columns are: uint8 [rows, bytes of some blocks]."""
        encoded = self.encoded[rows if self.order is None else self.order[rows]]
        size = encoded.shape[1] // max(self.shape[1] // self.block_size, 1)
        return encoded[:, start // self.block_size * size : -(-stop // self.block_size) * size]

    def _decode(self, encoded: np.ndarray) -> torch.Tensor:
        if self.dtype is not None:
            return torch.from_numpy(np.array(encoded)).view(self.dtype)
        if self.quantisation.name in TYPES:
            return decode_values(encoded, self.quantisation.name, self.device)
        from gguf.quants import dequantize

        try:
            return torch.from_numpy(dequantize(np.ascontiguousarray(encoded), self.quantisation))
        except NotImplementedError as error:
            raise ValueError(f"quantisation {self.quantisation.name} is not supported") from error


class _Header:
    """
    Metadata and the list of tensors. Reading past the end of the file raises, and the sum of all counts is
    limited, so that no file costs more time or memory than that of a large model.
    """

    def __init__(self, path: str, gguf: Any):
        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        self.position = 4
        self.items_left = MAX_ITEMS
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in self._counted(key_count):
            key = self._string()
            if key in self.metadata:
                raise ValueError(f"key {key!r} comes twice")
            self.metadata[key] = self._value(self._scalar("I"))
        self.tensors: dict[str, GGUFTensor] = {}
        self._read_tensors(path, tensor_count, gguf)

    def _read_tensors(self, path: str, count: int, gguf: Any) -> None:
        entries = []
        for _ in self._counted(count):
            name, dimensions = self._string(), self._scalar("I")
            if not 1 <= dimensions <= 4:
                raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]  # the file begins with columns
            entries.append((name, shape, gguf.GGMLQuantizationType(self._scalar("I")), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = free = -(-self.position // alignment) * alignment
        for name, shape, quantisation, offset in sorted(entries, key=lambda entry: entry[3]):
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
            if shape[-1] % block_size:
                raise ValueError(f"tensor {name!r} of shape {shape} cannot be stored as {quantisation.name}")
            row_bytes = shape[-1] // block_size * block_bytes
            start, size = begin + offset, math.prod(shape[:-1]) * row_bytes
            if start < free or name in self.tensors:
                raise ValueError(f"tensor {name!r} overlaps another or comes twice")
            if start + size > len(self.data):
                raise ValueError(f"tensor {name!r} ends after the end of the file")
            free = start + size
            encoded = np.frombuffer(self.data, np.uint8, size, start).reshape(*shape[:-1], row_bytes)
            self.tensors[name] = GGUFTensor(path, name, shape, quantisation, block_size, encoded)

    def _counted(self, count: int) -> range:
        self.items_left -= count
        if self.items_left < 0:
            raise ValueError(f"its header announces more than {MAX_ITEMS} items")
        return range(count)

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.position)[0]
        self.position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self.position = self.position, self.position + length
        if self.position > min(len(self.data), MAX_HEADER_BYTES):
            raise ValueError("a text runs past the end of the file or of any reasonable header")
        return self.data[start : self.position].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(SCALARS[kind])
        kind, count = self._scalar("I"), self._scalar("Q")
        items = self._counted(count)
        if kind == STRING:
            return [self._string() for _ in items]
        values = np.frombuffer(self.data, "<" + SCALARS[kind], count, self.position)
        self.position += values.nbytes
        return values.tolist()


def _rotary_order(rows: int, heads: int) -> np.ndarray | None:
    """
    Where each row of a query or key projection is stored. llama.cpp rotates neighbouring rows of a head
    against each other and stores them so; here a head's first half is rotated against its second.
    """
    if heads < 1 or rows % (2 * heads):
        return None  # the shape is wrong, which is an error when the tensor is loaded
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
