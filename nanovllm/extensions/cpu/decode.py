"""Which models have a compiled decode step, and how it takes the place of their forward.

Numba is loaded with the first of them. The step runs on torch's own threads of OpenMP: others would wait for
a core on which these spin.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.config import Config
from nanovllm.engine.interfaces import Observer
from nanovllm.extensions.cpu.packing import BYTES, GROUP, HALF, HALVES, LANES, NIBBLES, pack, quantise
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers.linear import LinearBase
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3MLP, Qwen3Model
from nanovllm.utils.context import get_context

OPENMP = "GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads"  # GNU's


class CompiledDecode(Observer):
    """Gives a model its compiled step when it is loaded, unless options say enforce_eager or exact."""

    def __init__(self, config: Config):
        is_plain = config.device == "cpu" and not config.enforce_eager and not config.exact
        self.is_wanted = is_plain and importlib.util.find_spec("numba") is not None

    def before_warmup(self, model: nn.Module) -> None:
        if self.is_wanted and can_compile(model):
            CompiledStep(model)


def can_compile(model: nn.Module) -> bool:
    """
    Whether this is a dense Llama-like model on one rank of a CPU, whose layers have GGUF's packed codes, and
    whose KV cache is in bfloat16.
    """
    if type(model).forward is not Qwen3ForCausalLM.forward or type(model.model) is not Qwen3Model:
        return False
    rotations = {layer.self_attn.rotary_emb for layer in model.model.layers}
    return len(rotations) == 1 and all(map(_can_compile_layer, model.model.layers))


def _can_compile_layer(layer: nn.Module) -> bool:
    kinds = type(layer), type(layer.self_attn), type(layer.mlp)
    if kinds != (Qwen3DecoderLayer, Qwen3Attention, Qwen3MLP):
        return False
    attn = layer.self_attn.attn
    layout = attn.backend.layout
    is_plain = (type(layout), type(attn.variant)) == (CacheLayout, AttentionVariant)
    fits = is_plain and layout.dtype == torch.bfloat16 and attn.head_dim % LANES == 0
    return fits and all(map(_is_packed, _matrices(layer)))


def _matrices(layer: nn.Module) -> list[LinearBase]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]


def _is_packed(linear: LinearBase) -> bool:
    """Whether it is runs of codes whose order is known, and which there is a kind of blocks for."""
    runs = getattr(linear.matrix, "runs", ())
    are_codes = linear.group.size == 1 and bool(runs) and all(hasattr(run, "groups") for run in runs)
    return are_codes and None not in map(_kind_of, runs)


def _kind_of(run: Any) -> int | None:
    """The kind of its blocks."""
    if run.readable_group == GROUP:
        return NIBBLES if run.digits == 1 else BYTES
    return HALVES if run.readable_group == HALF and run.is_symmetric else None


@functools.cache
def load_functions() -> Any:
    """
    The module of compiled functions. They are kept in the user's cache, in a folder for this version of their
    source, of which Numba itself would see one file alone.
    """
    import numba
    from llvmlite import binding

    if not has_openmp():
        for name in OPENMP:
            binding.add_symbol(name, 1)  # where one thread never calls it
    source = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nano-vllm"
    folder = cache / f"numba-{hashlib.sha256(source).hexdigest()[:16]}"
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        from nanovllm.extensions.cpu import compiled
    finally:
        numba.config.CACHE_DIR = before
    return compiled


def has_openmp() -> bool:
    """Whether torch was linked with GNU's OpenMP."""
    return os.name == "posix" and hasattr(ctypes.CDLL(None), OPENMP[0])


class CompiledStep:
    """Takes the place of a model's forward, and of its head's logits, in decode steps of few rows."""

    def __init__(self, model: nn.Module):
        self.functions = load_functions()
        self.max_rows = self.functions.MAX_ROWS
        self.embed_tokens, self.head = model.model.embed_tokens, model.lm_head
        self.attention = model.model.layers[0].self_attn.attn
        self.width = model.model.layers[0].mlp.down_proj.matrix.shape[1]
        self.num_threads = torch.get_num_threads() if has_openmp() else 1
        self.packed: list[Tensor] = []  # whose addresses the step has
        self.weights = self._weights(model.model)
        weight = self.head.weight.to_dense() if self.head.weight.is_mkldnn else self.head.weight
        self.packed_head = quantise(weight)
        self.run_model, self.run_head = model.forward, model.lm_head.logits
        model.forward, model.lm_head.logits = self.forward, self.logits

    def _weights(self, model: Qwen3Model) -> dict[str, Any]:
        """Those fields of a Step that are known before there is a KV cache."""
        layers, first = model.layers, model.layers[0].self_attn
        norms = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in layers]
        head_norms = [(layer.self_attn.q_norm, layer.self_attn.k_norm) for layer in layers if first.q_norm]
        matrices = [self._pack(linear) for layer in layers for linear in _matrices(layer)]
        most = max(map(len, matrices))
        filled = [parts + [(0, 0, 0, 0)] * (most - len(parts)) for parts in matrices]
        return {
            "matrices": np.array(filled, np.int64).reshape(len(layers), -1, most, 4),
            "norms": _stack(norms, len(model.norm.weight)),
            "head_norms": _stack(head_norms, first.attn.head_dim),
            "last_norm": model.norm.weight.float().numpy(),
            "angles": first.rotary_emb.cos_sin_cache.numpy(),
            "eps": np.float32(model.norm.eps),
            "scale": np.float32(first.attn.variant.scale),
        }

    def _pack(self, linear: LinearBase) -> list[tuple[int, int, int, int]]:
        """The parts of a matrix that a Step has."""
        parts, start = [], 0
        for run in linear.matrix.runs:
            rows, kind = slice(start, start + run.shape[0]), _kind_of(run)
            bias = None if linear.bias is None else linear.bias[rows]
            self.packed.append(pack(*run.groups(), kind, bias))
            parts.append((self.packed[-1].data_ptr(), kind, start // LANES, rows.stop // LANES))
            start = rows.stop
        return parts

    @functools.cached_property
    def step(self) -> Any:
        """With the engine's KV cache, which there is when the first step is run."""
        layers, k_cache = len(self.weights["norms"]), self.attention.k_cache
        sizes = 2, layers, *k_cache.shape
        strides = [layers * k_cache.numel(), k_cache.numel(), *k_cache.stride()]
        cache = k_cache.as_strided(sizes, strides, 0).view(torch.uint16).numpy()  # see kv_cache.py
        return self.functions.Step(**self.weights, cache=cache)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """As the model's."""
        step = get_context()
        if step.is_prefill or not 0 < len(input_ids) <= self.max_rows:
            return self.run_model(input_ids, positions)
        hidden_states = self.embed_tokens(input_ids)
        x, attn = hidden_states.float().numpy(), self.attention
        inputs = positions, step.slot_mapping, step.context_lens, step.block_tables
        shared = (
            _empty(len(x), attn.num_heads + 2 * attn.num_kv_heads, attn.head_dim),
            _empty(len(x), attn.num_heads, attn.head_dim),
            _empty(len(x), 2 * self.width),
        )
        arguments = self.step, x, *(each.numpy() for each in inputs), *shared
        self.functions.decode_step(arguments, self.num_threads)
        return torch.from_numpy(x).to(hidden_states.dtype)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """As the head's."""
        if get_context().is_prefill or not 0 < len(hidden_states) <= self.max_rows:
            return self.run_head(hidden_states)
        logits = _empty(len(hidden_states), len(self.packed_head) * LANES)
        head = np.array([[self.packed_head.data_ptr(), BYTES, 0, len(self.packed_head)]])
        self.functions.compute_logits((head, hidden_states.float().numpy(), logits), self.num_threads)
        return torch.from_numpy(logits)[:, : self.head.num_embeddings].to(hidden_states.dtype)


def _empty(*shape: int) -> np.ndarray:
    return np.empty(shape, np.float32)


def _stack(norms: list[tuple[nn.Module, nn.Module]], size: int) -> np.ndarray:
    """Float32 [layers, 2, size]."""
    weights = [norm.weight.float().numpy() for pair in norms for norm in pair]
    return np.array(weights, np.float32).reshape(-1, 2, size)
