"""Options that scripts for vLLM pass to `LLM`: those that change no result are accepted and said to be
without effect; those that would change one are refused, with what to do instead. Nothing else knows of them.
"""

import warnings
from typing import Any

from nanovllm.utils.validation import shown

WITHOUT_EFFECT = """
    async_scheduling calculate_kv_scales collect_detailed_traces compilation_config config_format
    cpu_offload_gb disable_cascade_attn disable_custom_all_reduce disable_log_requests disable_log_stats
    disable_mm_preprocessor_cache distributed_executor_backend enable_chunked_prefill
    enable_expert_parallel enable_log_requests enable_sleep_mode engine_use_ray guided_decoding_backend
    long_prefill_token_threshold max_context_len_to_capture max_long_partial_prefills
    max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture mm_processor_cache_gb
    mm_processor_kwargs model_loader_extra_config multi_step_stream_outputs num_lookahead_slots
    num_scheduler_steps num_speculative_tokens optimization_level otlp_traces_endpoint preemption_mode
    prefix_caching_hash_algo ray_workers_use_nsight scheduler_delay_factor scheduling_policy
    served_model_name skip_mm_profiling speculative_config speculative_model stream_interval
    structured_outputs_config swap_space trust_remote_code use_tqdm_on_load use_v2_block_manager
    worker_cls worker_use_ray
""".split()

TEXT_ONLY = "models here read and write text alone"
# Name -> the values that change nothing, and what to do for another one.
REFUSED: dict[str, tuple[tuple, str]] = {
    "data_parallel_size": ((1,), "python -m nanovllm.batch --data-parallel runs several engines"),
    "enable_lora": ((False,), "lora='folder or hub id' merges one adapter into the weights"),
    "enable_prompt_embeds": ((False,), "prompts are texts or token ids"),
    "generation_config": (("auto",), "pass SamplingParams to the call"),
    "hf_config_path": ((), "name single fields in hf_overrides"),
    "hf_token": ((), "it is called token here"),
    "limit_mm_per_prompt": (({},), TEXT_ONLY),
    "logits_processors": (([],), "use logit_bias, allowed_token_ids or bad_words of SamplingParams"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are the model's own"),
    "max_logprobs": (tuple(range(21)), "a request can ask for 20 at most"),
    "num_gpu_blocks_override": ((), "it is called num_kvcache_blocks here"),
    "override_generation_config": (({},), "pass SamplingParams to the call"),
    "pipeline_parallel_size": ((1,), "split the model with tensor_parallel_size"),
    "rope_scaling": (({},), "put it into hf_overrides"),
    "rope_theta": ((), "put it into hf_overrides"),
    "runner": (("auto", "generate"), "only text and scores are made"),
    "skip_tokenizer_init": ((False,), "pass token ids, and SamplingParams(detokenize=False)"),
    "task": (("auto", "generate"), "only text and scores are made"),
    "tokenizer_mode": (("auto", "hf"), "the tokenizer is what transformers makes of its files"),
    "tokenizer_revision": ((), "download that revision, and pass its folder as tokenizer"),
}


def without_foreign(options: dict[str, Any]) -> dict[str, Any]:
    """The options of this engine among these. Warns of those without effect; raises ValueError."""
    foreign = [name for name in options if name in WITHOUT_EFFECT or name in REFUSED]
    for name in foreign:
        value = options[name]
        allowed, remedy = REFUSED.get(name, ((value,), ""))
        if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
            raise ValueError(f"{name}={shown(value)} is not offered: {remedy}")
    if foreign:
        warnings.warn(f"options without effect: {', '.join(foreign)}", stacklevel=5)
    return {name: value for name, value in options.items() if name not in foreign}
