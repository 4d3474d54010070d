"""Checks of sampling parameters that extensions serve."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams
from nanovllm.utils.validation import (
    MAX_FLOAT,
    MAX_INT,
    MIN_FLOAT,
    check,
    check_bool,
    integer,
    is_number,
    number,
    shown,
)

MAX_N = 16_384
MAX_LOGIT_BIAS = 100.0
TEXTS = "a list of texts, none of them empty or with a lone surrogate"
IDS = "a list of token ids"
CHECKS = {
    "include_stop_str_in_output": check_bool,
    "skip_special_tokens": check_bool,
    "detokenize": check_bool,
    "top_p": number(MIN_FLOAT, 1, "above 0 and at most 1"),
    "top_k": number(-1, MAX_INT, "0 or -1 (all tokens) or an integer above", int),
    "min_p": number(0, 1, "from 0 to 1"),
    "presence_penalty": number(-2, 2, "from -2 to 2"),
    "frequency_penalty": number(-2, 2, "from -2 to 2"),
    "repetition_penalty": number(MIN_FLOAT, MAX_FLOAT, "a number above 0"),
    "n": integer(1, MAX_N),
    "logprobs": integer(0, MAX_LOGPROBS, None),
    "prompt_logprobs": integer(0, MAX_LOGPROBS, None),
}


def check_sampling(params: SamplingParams) -> None:
    """Numbers and flags become Python's own, collections become tuples. Raises ValueError."""
    _set_each(params, "stop_token_ids", as_tuple(params.stop_token_ids), is_token_id, int, IDS)
    said = f"an integer from 0 to max_tokens={params.max_tokens}"
    params.check(CHECKS | {"min_tokens": number(0, params.max_tokens or MAX_INT, said, int)})
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
    given, rule = getattr(params, name), f"{name} must be {allowed}"
    check(values is not None, rule, given)
    for value in values:
        if not is_good(value):
            # A long collection is shortened in the message, so that it may not show the bad value.
            fault = "" if value is given else f" (at fault: {shown(value)})"
            check(False, rule + fault, given)
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
