"""Checks of sampling parameters that extensions serve."""

from collections.abc import Mapping
from typing import Any

from nanovllm.sampling_params import (
    MAX_FLOAT,
    MAX_LOGPROBS,
    MAX_TOKENS,
    MIN_FLOAT,
    SamplingParams,
    as_tuple,
    is_text,
    is_token_id,
)
from nanovllm.utils.validation import check_bool, is_number, shown

MAX_N = 16_384
MAX_LOGIT_BIAS = 100.0
TEXTS = "a list of texts, none of them empty or with a lone surrogate"
IDS = "a list of token ids"


def check_sampling(params: SamplingParams) -> None:
    """Numbers and flags become Python's own, collections become tuples. Raises ValueError."""
    for name in ("include_stop_str_in_output", "skip_special_tokens", "detokenize"):
        check_bool(getattr(params, name), name)
    params.set_number("top_p", float, MIN_FLOAT, 1, "above 0 and at most 1")
    params.set_number("top_k", int, -1, MAX_TOKENS, "0 or -1 (all tokens) or an integer above")
    params.set_number("min_p", float, 0, 1, "from 0 to 1")
    params.set_number("presence_penalty", float, -2, 2, "from -2 to 2")
    params.set_number("frequency_penalty", float, -2, 2, "from -2 to 2")
    params.set_number("repetition_penalty", float, MIN_FLOAT, MAX_FLOAT, "a number above 0")
    params.set_number("n", int, 1, MAX_N, f"an integer from 1 to {MAX_N}")
    params.set_optional("logprobs", 0, MAX_LOGPROBS)
    params.set_optional("prompt_logprobs", 0, MAX_LOGPROBS)
    most, said = params.max_tokens or MAX_TOKENS, f"an integer from 0 to max_tokens={params.max_tokens}"
    params.set_number("min_tokens", int, 0, most, said)
    _check_texts(params)
    if params.allowed_token_ids is not None:
        allowed = as_tuple(params.allowed_token_ids) or None
        said = f"None or {IDS}, which is not empty"
        params.set_each("allowed_token_ids", allowed, is_token_id, int, said)
    bias = params.logit_bias
    bias = tuple(bias.items()) if isinstance(bias, Mapping) else as_tuple(bias)
    biases = "a dict of token ids with biases from -100 to 100"
    params.set_each("logit_bias", bias, _is_bias, lambda pair: (int(pair[0]), float(pair[1])), biases)


def _check_texts(params: SamplingParams) -> None:
    given = params.stop
    stop = (given,) if isinstance(given, str) else as_tuple(given)
    params.set_each("stop", stop, is_text, str, f"a text or {TEXTS}")
    if stop and not params.detokenize:
        message = "stop needs a text to look at, but detokenize is False; got stop="
        raise ValueError(message + shown(given))
    params.set_each("bad_words", as_tuple(params.bad_words), is_text, str, TEXTS)


def _is_bias(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and is_token_id(value[0])
    return is_pair and is_number(value[1], float, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
