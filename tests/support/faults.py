"""Where an engine can be made to fail."""

from engines import observer_of

from nanovllm import LLM
from nanovllm.engine.batch import StepOutput
from nanovllm.extensions.prefixes.token_prefixes import TokenPrefixes
from nanovllm.extensions.structured.matchers import CompiledGrammar
from nanovllm.extensions.text import llm as text_llm
from nanovllm.extensions.text import results as texts
from nanovllm.extensions.text.stop_texts import StopTexts

METHODS = {
    "scheduler": ["add", "schedule", "preempt", "advance", "postprocess", "end", "_release"],
    "block_manager": [
        "can_allocate",
        "allocate",
        "deallocate",
        "can_append",
        "may_append",
        "_open_block",
    ],
    "prefix cache": ["find", "allocated", "written", "leaving", "prepare", "receive"],
    "runner": [
        "call",
        "run",
        "prepare_prefill",
        "prepare_decode",
        "prepare_sample",
        "run_model",
        "forward",
        "sample",
        "sample_logits",
    ],
    "batches": ["prefill", "decode"],
    "device slots": ["apply"],
    "bias": ["prepare", "apply", "drawn"],
    "penalties": ["prepare", "apply", "drawn"],
    "filters": ["prepare", "apply"],
    "bitmask": ["host_input", "_make_masks", "apply", "ended"],
    "grammars": ["take"],
    "logprobs": ["drawn", "record"],
    "scores": ["prepare", "hidden", "record"],
    "scores in the prefix cache": ["max_cached"],
    "model": ["forward", "compute_logits"],
    "engine": ["_launch", "_sample", "_collect"],
    "stop texts": ["added", "after_step", "ended"],
    "output": ["to_host", "token_ids"],
    "text": ["find_stop"],
    "results": ["make_result"],
    "progress bar": ["update", "set_postfix"],
}
SITES = [(place, name) for place, names in METHODS.items() for name in names]


def object_of(llm: LLM, place: str):
    runner = llm.model_runner
    return {
        "scheduler": llm.scheduler,
        "block_manager": llm.scheduler.block_manager,
        "prefix cache": TokenPrefixes,
        "scores in the prefix cache": llm.parts.prefix_cache,
        "runner": runner,
        "batches": llm.batches,
        "device slots": runner.slots,
        "model": runner.model,
        "engine": llm,
        "grammars": CompiledGrammar,
        "output": StepOutput,
        "stop texts": observer_of(llm, StopTexts),
        "text": texts.GrowingText,
        "results": text_llm,
        "progress bar": text_llm.tqdm,
        **{processor.name: processor for processor in llm.parts.logits_processors},
    }[place]
