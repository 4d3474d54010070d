"""Options and methods that scripts for vLLM use and this engine does not have: options that change no result
are accepted and said to be without effect; those that would change one are refused, and methods missed, with
what to do instead. Nothing else knows of them.
"""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import shown

WITHOUT_EFFECT = """
    async_scheduling calculate_kv_scales collect_detailed_traces compilation_config config_format
    data_parallel_rank disable_cascade_attn disable_custom_all_reduce disable_log_requests
    disable_log_stats disable_mm_preprocessor_cache distributed_executor_backend enable_chunked_prefill
    enable_expert_parallel enable_log_requests engine_use_ray guided_decoding_backend
    long_prefill_token_threshold max_context_len_to_capture max_long_partial_prefills
    max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture mm_processor_cache_gb
    mm_processor_kwargs model_loader_extra_config multi_step_stream_outputs num_lookahead_slots
    num_scheduler_steps num_speculative_tokens optimization_level otlp_traces_endpoint output_kind
    preemption_mode prefix_caching_hash_algo priority ray_workers_use_nsight scheduler_delay_factor
    scheduling_policy served_model_name skip_clone skip_mm_profiling skip_reading_prefix_cache
    spaces_between_special_tokens speculative_config speculative_model stream_interval
    structured_outputs_config swap_space trace_headers trust_remote_code use_tqdm_on_load
    use_v2_block_manager worker_use_ray
""".split()

NO_BEAMS = "SamplingParams(n=...) draws several completions"
OWN_CODE = "ranks run this project's own code alone"
NEW_ENGINE = "llm.exit() frees the memory; make a new engine"
ONE_ADAPTER = "LLM(model, lora='folder or hub id') merges one adapter into the weights"
STRUCTURED = "pass structured_outputs=StructuredOutputsParams(...)"
ONLY_TEXT = "only text and scores are made"
OWN_PARAMS = "pass SamplingParams to the call"
OVERRIDES = "put it into hf_overrides"
SCORES = "llm.score(texts) says how likely texts are"
PROFILER = "torch.profiler around a call"
# Each with what to do instead.
REFUSED = {
    "best_of": NO_BEAMS,
    "early_stopping": NO_BEAMS,
    "length_penalty": NO_BEAMS,
    "num_beams": NO_BEAMS,
    "use_beam_search": NO_BEAMS,
    "worker_cls": OWN_CODE,
    "worker_extension_cls": OWN_CODE,
    "enable_sleep_mode": NEW_ENGINE,
    "enable_lora": ONE_ADAPTER,
    "lora_request": ONE_ADAPTER,
    "prompt_adapter_request": ONE_ADAPTER,
    "guided_decoding": STRUCTURED,
    "guided_options_request": STRUCTURED,
    "runner": ONLY_TEXT,
    "task": ONLY_TEXT,
    "generation_config": OWN_PARAMS,
    "override_generation_config": OWN_PARAMS,
    "rope_scaling": OVERRIDES,
    "rope_theta": OVERRIDES,
    "limit_mm_per_prompt": "models here read and write text alone",
    "cpu_offload_gb": "for smaller weights there are quantization='int4' and more ranks",
    "data_parallel_size": "python -m nanovllm.batch --data-parallel runs several engines",
    "do_sample": "SamplingParams(temperature=0) is greedy, and any other temperature samples",
    "enable_prompt_embeds": "prompts are texts or token ids",
    "extra_args": "nothing here reads them",
    "flat_logprobs": "logprobs are a dict for each token",
    "hf_config_path": "name single fields in hf_overrides",
    "hf_token": "it is called token here",
    "num_gpu_blocks_override": "it is called num_kvcache_blocks here",
    "num_return_sequences": "it is called n here",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words of SamplingParams",
    "max_logprobs": "a request can ask for 20 at most",
    "pipeline_parallel_size": "split the model with tensor_parallel_size",
    "prompt_token_ids": "token ids are prompts, too: pass them as such",
    "skip_tokenizer_init": "pass token ids, and SamplingParams(detokenize=False)",
    "tokenization_kwargs": "pass the token ids that the tokenizer makes with them",
    "truncate_prompt_tokens": "pass the last token ids of llm.encode(prompt)",
    "tokenizer_mode": "the tokenizer is what transformers makes of its files",
    "tokenizer_revision": "download that revision, and pass its folder as tokenizer",
}
# The value, or a tuple of several, with which some of these change nothing. None never does.
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "early_stopping": False,
    "length_penalty": 1.0,
    "num_beams": 1,
    "use_beam_search": False,
    "worker_cls": "auto",
    "worker_extension_cls": "",
    "enable_sleep_mode": False,
    "enable_lora": False,
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "generation_config": "auto",
    "override_generation_config": {},
    "rope_scaling": {},
    "limit_mm_per_prompt": {},
    "cpu_offload_gb": (0, 0.0),
    "data_parallel_size": 1,
    "enable_prompt_embeds": False,
    "extra_args": {},
    "flat_logprobs": False,
    "logits_processors": [],
    "max_logprobs": tuple(range(21)),
    "pipeline_parallel_size": 1,
    "skip_tokenizer_init": False,
    "tokenization_kwargs": {},
    "tokenizer_mode": ("auto", "hf"),
}
MISSING_METHODS = {
    "embed": SCORES,
    "classify": SCORES,
    "reward": SCORES,
    "beam_search": NO_BEAMS,
    "collective_rpc": OWN_CODE,
    "apply_model": OWN_CODE,
    "sleep": NEW_ENGINE,
    "wake_up": NEW_ENGINE,
    "reset_prefix_cache": "enable_prefix_caching=False computes every prompt anew",
    "get_metrics": "llm.stats() has the counts",
    "start_profile": PROFILER,
    "stop_profile": PROFILER,
    "set_tokenizer": "LLM(model, tokenizer=...)",
    "llm_engine": "LLM is the engine: llm.config, llm.add_request(...), llm.step()",
}

SamplingParams.__struct_fields__ = tuple(each.name for each in fields(SamplingParams))  # vLLM's name
FILLED_IN = ("hf_config", "eos")  # fields of Config that are no options
OPTIONS = {option.name: option for option in fields(Config) if option.name not in FILLED_IN}


def make_config(model: str, options: dict[str, Any], make: type[Config] = Config) -> Config:
    """What `make` makes of an engine's options, among which some of vLLM's may be."""
    if found := options.keys() & set(FILLED_IN):
        raise TypeError(f"{min(found)} is no option: the engine fills it in from the checkpoint")
    return make(model, **own_options(options, OPTIONS, stacklevel=5))


def own_options(options: Mapping[str, Any], known: Collection[str], stacklevel: int = 2) -> dict[str, Any]:
    """
    The options with a `known` name. Warns of those without effect. Raises ValueError for one that is refused
    and TypeError for an unknown one, with a known one like it; fields of SamplingParams are said to be such.
    """
    ignored = []
    for name in [name for name in options if name not in known]:
        value = options[name]
        if name in REFUSED:
            neutral = NEUTRAL.get(name)
            neutral = neutral if isinstance(neutral, tuple) else (neutral,)
            if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
                raise ValueError(f"{name}={shown(value)} is not offered: {REFUSED[name]}")
        elif name in WITHOUT_EFFECT:
            ignored += [name] if value is not None else []
        elif name in SamplingParams.__struct_fields__:
            raise TypeError(f"{name} is a sampling parameter: pass SamplingParams({name}={shown(value)})")
        else:
            alike = difflib.get_close_matches(name, known, n=1)
            hint = f"the nearest known one is {alike[0]!r}" if alike else f"known ones: {', '.join(known)}"
            raise TypeError(f"unknown option {shown(name)}; {hint}")
    if ignored:
        warnings.warn(f"options without effect: {', '.join(ignored)}", stacklevel=stacklevel + 1)
    return {name: value for name, value in options.items() if name in known}


def takes_foreign(function: Callable) -> Callable:
    """The function of an object, which can also be called with options of vLLM, see `own_options`."""
    _, *known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **own_options(options, known))

    return call
