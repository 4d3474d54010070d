"""From a configuration to the parts of an engine: the only file that names extensions.

The core's own parts come first, which are all that there are where the folder `extensions` is missing; else
`extend` puts other functions in their place. Extensions with kernels are imported at once, since compiling
ahead looks for kernels before a model is built; some others where they are needed.
"""

import functools
from pathlib import Path
from typing import Any

from torch import nn

from nanovllm import sampling_params
from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.distributed.ranks import Ranks
from nanovllm.engine.block_manager import PrefixCache
from nanovllm.engine.interfaces import Parts
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers.attention import get_backend
from nanovllm.models.qwen3 import Qwen3ForCausalLM

EXTENDED = Path(__file__).with_name("extensions").joinpath("__init__.py").exists()
if EXTENDED:
    from nanovllm.extensions.api.foreign_options import make_config
    from nanovllm.extensions.api.llm import with_api
    from nanovllm.extensions.checkpoints import opening, recommended
    from nanovllm.extensions.cpu import decode
    from nanovllm.extensions.exact import exact_parts
    from nanovllm.extensions.experts import moe
    from nanovllm.extensions.int8_cache.layout import Int8Layout
    from nanovllm.extensions.logits.kernels.likelihood import token_logprobs as token_logprobs  # for trainers
    from nanovllm.extensions.logits.processors import make_processors
    from nanovllm.extensions.models.attention_rule import set_rules
    from nanovllm.extensions.models.config import read_any_config
    from nanovllm.extensions.models.known import MODELS, gguf_models
    from nanovllm.extensions.prefixes import cascade, token_prefixes
    from nanovllm.extensions.products import onednn, products
    from nanovllm.extensions.quantised import assignment, formats, fp8
    from nanovllm.extensions.ranks import peer_group, reports
    from nanovllm.extensions.safety import admission, prompt_checks, recovery, sampling_checks, stats
    from nanovllm.extensions.safety.options import ExtendedConfig
    from nanovllm.extensions.safety.structured_checks import check_form
    from nanovllm.extensions.startup import graph_trial, memory, record_ahead
    from nanovllm.extensions.structured.bitmask import BitmaskProcessor
    from nanovllm.extensions.structured.params import StructuredOutputsParams, check_structured_outputs
    from nanovllm.extensions.text import stop_texts
    from nanovllm.extensions.text.llm import TextLLM
    from nanovllm.extensions.timeline.snapshot import SnapshotLLM

    sampling_params.StructuredOutputsParams = StructuredOutputsParams  # scripts for vLLM import it there
    sampling_params.SamplingParams.checks = [sampling_checks.check_sampling, check_structured_outputs]
    StructuredOutputsParams.check = check_form


def assemble_core(config: Config) -> Parts:
    """The parts of one rank, which are the core's own."""
    return Parts(Qwen3ForCausalLM, CacheLayout(config.kv_cache_torch_dtype), get_backend, Ranks)


# With extensions


def extend(llm: type[LLMEngine]) -> type[LLMEngine]:
    """The engine put together with extensions, and with the ways to call it that they add."""
    if not EXTENDED:
        return llm
    made = with_api(llm, TextLLM, stats.StatsLLM, SnapshotLLM, recommended.RecommendingLLM)
    made.make_prompts = type("Prompts", (prompt_checks.CheckedInputProcessor, TextLLM.make_prompts), {})
    made.open_model = staticmethod(open_model)
    made.assembly = staticmethod(assemble)
    return made


def open_model(model: str, options: dict[str, Any]) -> tuple[Config, Checkpoint]:
    """
    What the arguments of an engine say, among which some of vLLM's may be, completed by the checkpoint that
    they name; and that, opened. Raises TypeError and ValueError naming an option.
    """
    config = make_config(model, options, ExtendedConfig)
    checkpoint = open_checkpoint(config)
    return config.with_checkpoint(checkpoint, options), checkpoint


def open_checkpoint(config: Config) -> Checkpoint:
    """The checkpoint that these options name, opened without reading its weights."""
    read = functools.partial(read_config, model_impl=config.model_impl)
    return opening.open_checkpoint(config, gguf_models(), read)


def read_config(source: str, raw: dict[str, Any], model_impl: str = "auto") -> ModelConfig:
    """
    What is to be known of the model whose config.json says `raw`; `model_impl` as the engine's option. Raises
    ValueError naming the source and what is wrong or not supported.
    """
    from nanovllm.extensions.transformers.config import model_type_decides, read_transformers_config

    return read_any_config(source, raw, model_impl, MODELS, read_transformers_config, model_type_decides)


def assemble(config: Config) -> Parts:
    """The parts of one rank."""
    bias, *_, scores = processors = make_processors(config.logprobs_mode)
    bitmask = BitmaskProcessor()
    admission_control = admission.AdmissionControl(config, bias)
    prefix_cache = token_prefixes.TokenPrefixes() if config.enable_prefix_caching else PrefixCache()
    prefix_cache.max_cached = scores.max_cached
    parts = Parts(
        functools.partial(build_model, quantization=config.quantization, exact=config.exact),
        Int8Layout() if config.kv_cache_dtype == "int8" else CacheLayout(config.kv_cache_torch_dtype),
        # Of (config, device, layers, layout): who computes attention, where prefixes are read once.
        lambda *where: cascade.CascadeBackend(get_backend(*where), where[0]),
        reports.ReportingRanks,
        peer_group.group_maker(config),
        observers=(
            *record_ahead.observers(config, functools.partial(peer_group.stand_in, config)),
            memory.MemoryHint(config),
            recovery.Recovery(admission_control),
            bitmask,
            stop_texts.StopTexts(),
            stats.Finished(),
            decode.CompiledDecode(config),
        ),
        prefix_cache=prefix_cache,
        admissions=(token_prefixes.HoldBack(), admission_control),
        logits_processors=(*processors, bitmask),
        can_record=Parts.can_record if config.hf_config.architectures else graph_trial.can_be_recorded,
    )
    if config.timeline is not None:
        from nanovllm.extensions.timeline.pages import make_recorder

        parts.observers += (make_recorder(config),)
    if config.exact:
        exact_parts.make_exact(parts, config, cascade.WholePrefixBackend, formats.read_scheme)
    if config.extensions:
        from nanovllm.extensions.lab.adding import add_extensions

        parts = add_extensions(parts, config.extensions, config.tensor_parallel_size)
    return parts


def get_model_class(config: ModelConfig) -> type[nn.Module]:
    """The class of the architecture that the checkpoint names, or that for all others."""
    if config.architectures:
        return MODELS[config.architectures[0]]
    from nanovllm.extensions.transformers.model import TransformersForCausalLM

    return TransformersForCausalLM


def build_model(config: ModelConfig, quantization: str | None = None, exact: bool = False) -> nn.Module:
    """
    The model, with memory for its weights in the format that the checkpoint or this option of the engine asks
    for. Raises ValueError if that is not supported.
    """
    scheme = formats.read_scheme(config.quantization_config, quantization)
    with assignment.without_weights():
        model = get_model_class(config)(config)
    set_rules(model)
    assignment.assign_weights(model, scheme, exact_parts.dense_weight(exact, products.FoldingWeight))
    exact_parts.use_heads(model, exact)
    onednn.use_packed_heads(model)
    if exact:
        exact_parts.use_exact(model, moe, fp8.Fp8)
    return model
