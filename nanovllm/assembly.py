"""From a configuration to the parts of an engine: the only file that names extensions."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.config import CHECKS, FILLED_IN, KV_CACHE_DTYPES, Config
from nanovllm.distributed.group import Group
from nanovllm.engine.device_rows import can_group
from nanovllm.engine.interfaces import Parts, record_always
from nanovllm.engine.policies import Admission, PrefixCache
from nanovllm.extensions.api.foreign_options import own_options
from nanovllm.extensions.checkpoints.adapter import check_adaptable, open_adapter
from nanovllm.extensions.checkpoints.gguf import GGUFCheckpoint
from nanovllm.extensions.checkpoints.hub import download
from nanovllm.extensions.checkpoints.shapes import SHAPES, ShapeCheckpoint
from nanovllm.extensions.checkpoints.smollm2 import fetch_smollm2
from nanovllm.extensions.checkpoints.untrusted import CheckedFolder
from nanovllm.extensions.int8_cache.layout import Int8Layout
from nanovllm.extensions.logits.budget import RuleBudget
from nanovllm.extensions.models import gemma3, gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe
from nanovllm.extensions.models.config import DecoderConfig, read_decoder
from nanovllm.extensions.models.facts import Facts
from nanovllm.extensions.models.windows import set_attention
from nanovllm.extensions.prefixes.cascade import CascadeBackend
from nanovllm.extensions.prefixes.token_prefixes import HoldBack, TokenPrefixes
from nanovllm.extensions.products.products import FoldingWeight
from nanovllm.extensions.quantised.formats import read_scheme
from nanovllm.extensions.ranks.gloo_group import GlooGroup
from nanovllm.extensions.ranks.peer_group import PeerGroup, stand_in
from nanovllm.extensions.ranks.reports import ReportingRanks
from nanovllm.extensions.safety.forecast import Forecast
from nanovllm.extensions.safety.isolation import Isolation
from nanovllm.extensions.safety.options import CHECKS_OF_EXTENSIONS
from nanovllm.extensions.startup.compile_ahead import CompileAhead
from nanovllm.extensions.startup.graph_trial import can_be_recorded
from nanovllm.extensions.transformers.config import model_type_decides, read_transformers_config
from nanovllm.extensions.transformers.model import TransformersForCausalLM
from nanovllm.kernels.cache_layout import CacheLayout
from nanovllm.layers.attention import Attention, AttentionBackend, get_backend
from nanovllm.layers.linear import assign_weights, without_weights
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import shown

FILES = llama, mistral, qwen2, qwen3, qwen3_moe, gemma3, gpt_oss
CHECKS.update(CHECKS_OF_EXTENSIONS)
KV_CACHE_DTYPES["int8"] = torch.uint8  # the bytes of extensions/int8_cache
MODELS: dict[str, Facts] = {file.FACTS.model.__name__: file.FACTS for file in FILES}


def assemble(config: Config) -> Parts:
    return Parts(
        build_model,
        make_layout,
        make_backend,
        ReportingRanks,
        collectives(config),
        observers=(CompileAhead(config, functools.partial(stand_in, config)),),
        prefix_cache=make_prefix_cache(config),
        admissions=make_admissions(config),
        can_record=record_always if config.hf_config.architectures else can_be_recorded,
    )


def open_model(model: str, options: dict[str, Any]) -> tuple[Config, Checkpoint]:
    """What the arguments of an engine say, completed by the checkpoint that they name; and that, opened."""
    config = make_config(model, options)
    hub = {"revision": config.revision, "cache_dir": config.download_dir, "token": config.token}
    named = config.model, config.load_format, config.tokenizer, config.hf_overrides, hub, config.lora
    checkpoint = open_checkpoint(*named, config.model_impl)
    if config.lora is not None:
        check_adaptable(checkpoint, config.lora)
    return config.with_checkpoint(checkpoint, options), checkpoint


def make_config(model: str, options: dict[str, Any]) -> Config:
    """From options, among which some of vLLM's may be. Raises TypeError and ValueError naming one."""
    filled_in = {name: value for name, value in options.items() if name in FILLED_IN}
    others = {name: value for name, value in options.items() if name not in FILLED_IN}
    sampling = SamplingParams.__struct_fields__
    own = own_options(others, Config.option_names(), sampling, stacklevel=5)
    return Config.from_options(model, filled_in | own)


def open_checkpoint(
    model: str | os.PathLike, load_format: str = "auto", tokenizer: str | os.PathLike | None = None,
    hf_overrides: dict[str, Any] | None = None, hub: dict[str, Any] | None = None,
    lora: str | os.PathLike | None = None, model_impl: str = "auto",
) -> Checkpoint:  # fmt: skip
    """
    Open a checkpoint without reading its weights. `model` is a folder, a `.gguf` file, a Hugging Face hub id,
    "smollm2" or, with load_format="dummy", one of `SHAPES`. Another `tokenizer` is in such a place, too.
    A `lora` adapter is a folder or a hub id. `hub` has options for downloads. Raises ValueError that says
    what was looked for.
    """
    hub = {name: value for name, value in (hub or {}).items() if value is not None}
    checkpoint = _open(model, load_format, hub)
    checkpoint.read_config = functools.partial(read_config, model_impl=model_impl)
    if hf_overrides:
        checkpoint.override(hf_overrides)
    hub.pop("revision", None)  # is the model's
    if lora is not None:
        checkpoint.changes = (open_adapter(lora, hub).merged,)
    if tokenizer is not None and os.fspath(tokenizer) != os.fspath(model):
        try:
            checkpoint.tokenizer_source = _open(tokenizer, "auto", hub, only_tokenizer=True)
        except ValueError as error:
            raise ValueError(f"tokenizer: {error}") from error
    return checkpoint


def _open(
    model: str | os.PathLike, load_format: str, hub: dict[str, Any], only_tokenizer: bool = False
) -> Checkpoint:
    dummy = load_format == "dummy"
    name = os.fspath(model)
    path = os.path.abspath(os.path.expanduser(name))
    if not name or not os.path.exists(path):
        if name in SHAPES and dummy:
            return ShapeCheckpoint(name, dummy)
        weights = not dummy and not only_tokenizer
        path = str(fetch_smollm2()) if name == "smollm2" else download(name, weights, **hub)
    if os.path.isfile(path):
        if load_format == "safetensors" or not path.lower().endswith(".gguf"):
            raise ValueError(f"model {name!r} is neither a folder nor, for load_format='gguf', a .gguf file")
        return GGUFCheckpoint(path, dummy, [facts for facts in MODELS.values() if facts.gguf])
    if load_format == "gguf":
        raise ValueError(f"model {name!r} is a folder, but load_format='gguf' reads a .gguf file")
    if not os.path.isdir(path):
        raise ValueError(f"model {name!r} is neither a folder nor a regular file")
    return CheckedFolder(path, dummy, only_tokenizer)


def read_config(source: str, raw: dict[str, Any], model_impl: str = "auto") -> DecoderConfig:
    """
    What is to be known of the model whose config.json says `raw`; `model_impl` as the engine's option. Raises
    ValueError naming the source and what is wrong or not supported.
    """
    try:
        # First, since the others' files have other fields.
        known = find_architectures(raw) if model_impl != "transformers" else []
        given = {name: value for name, value in raw.items() if value is not None}
        if known:
            return read_decoder(raw, known, MODELS[known[0]].defaults, given)
        if model_impl == "native":
            name = shown(given.get("architectures"))
            raise ValueError(
                f"model_impl='native' has no class for architectures {name}, only for {', '.join(MODELS)}"
            )
        kept = ("dtype", "torch_dtype", "quantization_config")
        try:
            sizes = read_transformers_config(raw)
        except ValueError as error:
            raise ValueError(f"{error}; known without transformers: {', '.join(MODELS)}") from None
        return read_decoder(raw, [], {}, sizes | {name: given[name] for name in kept if name in given})
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def find_architectures(raw: dict[str, Any]) -> list[str]:
    """Those of config.json that have a class here, or the one for its `model_type`."""
    names, kind = raw.get("architectures"), raw.get("model_type")
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = [str(names)]
    of_type = [name for name, facts in MODELS.items() if facts.model_type == kind]
    known = [name for name in names if name in MODELS]
    return of_type if of_type and not known and model_type_decides(names) else known


def get_model_class(config: DecoderConfig) -> type[nn.Module]:
    """The class of the first known architecture that the checkpoint names, or that for all others."""
    return MODELS[config.architectures[0]].model if config.architectures else TransformersForCausalLM


def build_model(config: DecoderConfig, quantization: str | None = None) -> nn.Module:
    """
    The model, with memory for its weights in the format that the checkpoint or this option of the engine asks
    for. Raises ValueError if that is not supported.
    """
    scheme = read_scheme(config.quantization_config, quantization)
    with without_weights():
        model = get_model_class(config)(config)
    set_attention(model, config)
    stacked = [name for name, param in model.named_parameters() if param.dim() > 2]  # by transformers
    if scheme is not None and stacked:
        raise ValueError(f"{stacked[0]} cannot be quantised, as experts can only in classes of this project")
    if scheme is not None:
        assign_weights(model, functools.partial(scheme.make_weight, FoldingWeight))
    else:
        assign_weights(model, lambda layer, name, sources: FoldingWeight(layer.shards))
    return model


def make_layout(config: Config) -> CacheLayout:
    """How keys and values lie in the cache."""
    is_int8 = config.kv_cache_torch_dtype == torch.uint8
    return Int8Layout() if is_int8 else CacheLayout(config.kv_cache_torch_dtype)


def make_backend(
    config: Config, device: torch.device, layers: list[Attention], layout: CacheLayout
) -> AttentionBackend:
    """Who computes attention. Raises ValueError if what `attention_backend` names cannot."""
    backend = get_backend(config, device, layers, layout)
    if not can_group(config):
        return backend
    heads = config.hf_config.num_attention_heads // config.hf_config.num_key_value_heads
    return CascadeBackend(backend, heads, config.torch_dtype.itemsize, device)


def collectives(config: Config) -> Callable[..., Group]:
    """What makes the group through which several ranks compute together."""
    on_gpus = config.device_of(0).type == "cuda"
    return functools.partial(PeerGroup, config=config) if on_gpus else GlooGroup


def make_prefix_cache(config: Config) -> PrefixCache:
    """What finds prefixes in the cache, and copies what of them is not a whole block."""
    return TokenPrefixes() if config.enable_prefix_caching else PrefixCache()


def make_admissions(config: Config) -> tuple[Admission, ...]:
    """All that may keep a sequence from running, though there is room for it."""
    return HoldBack(), RuleBudget(), Forecast(), Isolation(config.max_num_seqs)
