"""Checks of sampling parameters that extensions serve."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.sampling_params import MAX_LOGPROBS, MAX_TOKENS, SamplingParams
from nanovllm.utils.validation import check_bool, is_number, shown

MIN_FLOAT, MAX_FLOAT = sys.float_info.min, sys.float_info.max
MAX_N = 16_384
MAX_LOGIT_BIAS = 100.0
TEXTS = "a list of texts, none of them empty or with a lone surrogate"
IDS = "a list of token ids"


def check_sampling(params: SamplingParams) -> None:
    """Numbers and flags become Python's own, collections become tuples. Raises ValueError."""
    _set_each(params, "stop_token_ids", as_tuple(params.stop_token_ids), is_token_id, int, IDS)
    for name in ("include_stop_str_in_output", "skip_special_tokens", "detokenize"):
        check_bool(getattr(params, name), name)
    params.set_number("top_p", float, MIN_FLOAT, 1, "above 0 and at most 1")
    params.set_number("top_k", int, -1, MAX_TOKENS, "0 or -1 (all tokens) or an integer above")
    params.set_number("min_p", float, 0, 1, "from 0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        params.set_number(name, float, -2, 2, "from -2 to 2")
    params.set_number("repetition_penalty", float, MIN_FLOAT, MAX_FLOAT, "a number above 0")
    params.set_number("n", int, 1, MAX_N, f"an integer from 1 to {MAX_N}")
    params.set_optional("logprobs", 0, MAX_LOGPROBS)
    params.set_optional("prompt_logprobs", 0, MAX_LOGPROBS)
    most, said = params.max_tokens or MAX_TOKENS, f"an integer from 0 to max_tokens={params.max_tokens}"
    params.set_number("min_tokens", int, 0, most, said)
    given = params.stop
    stop = (given,) if isinstance(given, str) else as_tuple(given)
    _set_each(params, "stop", stop, is_text, str, f"a text or {TEXTS}")
    if stop and not params.detokenize:
        message = "stop needs a text to look at, but detokenize is False; got stop="
        raise ValueError(message + shown(given))
    _set_each(params, "bad_words", as_tuple(params.bad_words), is_text, str, TEXTS)
    if params.allowed_token_ids is not None:
        allowed = as_tuple(params.allowed_token_ids) or None
        said = f"None or {IDS}, which is not empty"
        _set_each(params, "allowed_token_ids", allowed, is_token_id, int, said)
    bias = params.logit_bias
    bias = tuple(bias.items()) if isinstance(bias, Mapping) else as_tuple(bias)
    biases = "a dict of token ids with biases from -100 to 100"
    _set_each(params, "logit_bias", bias, _is_bias, lambda pair: (int(pair[0]), float(pair[1])), biases)


def _set_each(
    params: SamplingParams,
    name: str,
    values: tuple | None,
    is_good: Callable[[Any], bool],
    convert: Callable[[Any], Any],
    allowed: str,
) -> None:
    """Check each value of a collection, and keep them as a tuple."""
    params.check(values is not None, name, allowed)
    for value in values:
        if not is_good(value):
            # A long collection is shortened in the message, so that it may not show the bad value.
            is_alone = value is getattr(params, name)
            params.check(False, name, allowed if is_alone else f"{allowed} (at fault: {shown(value)})")
    setattr(params, name, tuple(map(convert, values)))


def as_tuple(values: Any) -> tuple | None:
    """The collection as a tuple, and None as an empty one. Returns None for anything else."""
    if values is None:
        return ()
    return tuple(values) if isinstance(values, (list, tuple, set, frozenset)) else None


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and find_surrogate(value) < 0


def find_surrogate(text: str) -> int:
    """The index of the first lone surrogate, which UTF-8 cannot encode, or -1."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1


def is_token_id(value: Any) -> bool:
    return is_number(value, int, 0)


def _is_bias(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and is_token_id(value[0])
    return is_pair and is_number(value[1], float, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
