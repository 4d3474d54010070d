"""What one request asks for: how its tokens are drawn, when it ends, and what its result contains. Knows
nothing of the engine.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.validation import check, check_bool, find_surrogate, is_number, shown

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_N = 16_384
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_CHARACTERS = 2**20  # of a schema, a grammar, a regular expression, all choices
MIN_FLOAT, MAX_FLOAT = sys.float_info.min, sys.float_info.max


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """
    What a completion must look like; exactly one of

    json:        a JSON schema as a dict or text, or a pydantic model class: a JSON value that fits it.
    regex:       a regular expression in the syntax of Rust's regex, which the whole completion matches.
    choice:      a list of texts, of which the completion is one.
    grammar:     a context-free grammar in the notation of Lark or of GBNF, whose language it belongs to.
    json_object: True: any JSON object.

    disable_any_whitespace:        JSON has no spaces and line breaks between its parts.
    disable_additional_properties: JSON objects whose properties a schema lists have no others, unless it says
                                   `additionalProperties`.
    whitespace_pattern:            a regular expression of what may be between the parts of JSON, or nothing;
                                   None is any number of spaces, tabs and line breaks.

    Raises ValueError with the bad value. A schema is kept as text.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_bool(getattr(self, name), name)
        if self.json_object is not None:
            check_bool(self.json_object, "json_object")
            object.__setattr__(self, "json_object", self.json_object or None)
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = {kind: value for kind in kinds if (value := getattr(self, kind)) is not None}
        check(len(given) == 1, f"structured outputs need exactly one of {', '.join(kinds)}", given)
        if self.json is not None:
            object.__setattr__(self, "json", _read_schema(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            is_good = value is None or _is_text(value)
            check(is_good, f"{name} must be a text, not empty or with a lone surrogate", value)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            found = f"whitespace_pattern={shown(self.whitespace_pattern)}"
            raise ValueError(f"disable_any_whitespace leaves no white space, got {found} as well")
        if self.choice is not None:
            texts = _as_tuple(self.choice) or ()
            rule = "choice must be a list of texts, none of them empty or with a lone surrogate"
            check(texts != () and all(map(_is_text, texts)), rule, self.choice)
            object.__setattr__(self, "choice", texts)
        for name in ("json", "regex", "choice", "grammar", "whitespace_pattern"):
            value = getattr(self, name) or ""
            size = len(value) if isinstance(value, str) else sum(map(len, value))
            if size > MAX_CHARACTERS:
                raise ValueError(f"{name} must have at most {MAX_CHARACTERS:,} characters, got {size:,}")


@dataclass(slots=True, unsafe_hash=True)
class SamplingParams:
    """
    temperature:                divides the logits before sampling; 0 is greedy decoding.
    max_tokens:                 most tokens to generate, at least 1; None is as many as fit the context, whose
                                end is the end of every completion.
    ignore_eos:                 go on to `max_tokens` even when an end-of-sequence token is drawn.
    top_p:                      draw from the fewest likeliest tokens that together have this probability.
    top_k:                      draw from this many likeliest tokens; 0 and -1 are all of them.
    min_p:                      draw from tokens at least this probable, as a share of the likeliest one's.
    seed:                       draw the same tokens for the same prompt every time.
    n:                          how many completions of the prompt to draw, each with a seed of its own.
    stop:                       one or more texts that end the completion; its text then ends before them. If
                                one token completes several, the one that begins first counts, and of those
                                that begin together the first in the list.
    stop_token_ids:             token ids that end the completion; its text then ends before them.
    include_stop_str_in_output: keep in the text what ended it, whether a text or a token.
    min_tokens:                 before so many tokens nothing but `max_tokens` ends the completion.
    logprobs:                   return log-probabilities of each drawn token and of so many likeliest ones.
    prompt_logprobs:            the same for the prompt's tokens.
    presence_penalty:           subtracted from the logits of tokens that are in the completion.
    frequency_penalty:          subtracted from a token's logit once for each time it is in the completion.
    repetition_penalty:         divides the positive logits of tokens that are in prompt or completion, and
                                multiplies the negative ones (Keskar et al. 2019, arXiv:1909.05858).
    logit_bias:                 {token id: number to add to its logit}, from -100 to 100.
    allowed_token_ids:          the only tokens that may be drawn; None is all.
    bad_words:                  texts that may not be in the completion as the tokens that the tokenizer makes
                                of them at the beginning of a text or after a space. The same text in other
                                tokens (" Par" + "is") is not noticed.
    skip_special_tokens:        leave special tokens out of the text.
    detokenize:                 decode the tokens; if False, the text is empty and `stop` cannot be used.
    structured_outputs:         draw only tokens with which the completion can come to look as this says.

    Logits are changed in this order: biases and bans, penalties, the tokens that structured_outputs rules
    out, temperature, min_p, top_k, top_p (with the probabilities among the tokens that min_p and top_k left).
    Tokens with equal logits are kept or left out together. Log-probabilities are the model's, before any of
    these changes.

    Fields may be assigned to: the next call checks them again, and requests made before keep what they had.

    Raises ValueError with the bad value. Collections may be given as lists or sets, and `logit_bias` as a
    dict; they are kept as tuples.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            check_bool(getattr(self, name), name)
        self._set_number("temperature", float, 0, MAX_FLOAT, "finite and at least 0 (0 is greedy)")
        self._set_number("top_p", float, MIN_FLOAT, 1, "above 0 and at most 1")
        self._set_number("top_k", int, -1, MAX_TOKENS, "0 or -1 (all tokens) or an integer above")
        self._set_number("min_p", float, 0, 1, "from 0 to 1")
        self._set_number("presence_penalty", float, -2, 2, "from -2 to 2")
        self._set_number("frequency_penalty", float, -2, 2, "from -2 to 2")
        self._set_number("repetition_penalty", float, MIN_FLOAT, MAX_FLOAT, "a number above 0")
        self._set_number("n", int, 1, MAX_N, f"an integer from 1 to {MAX_N}")
        optional = dict(max_tokens=(1, MAX_TOKENS), seed=(0, MAX_SEED))
        optional |= dict.fromkeys(("logprobs", "prompt_logprobs"), (0, MAX_LOGPROBS))
        for name, (low, high) in optional.items():
            if getattr(self, name) is not None:
                self._set_number(name, int, low, high, f"None or an integer from {low} to {high}")
        most, said = self.max_tokens or MAX_TOKENS, f"an integer from 0 to max_tokens={self.max_tokens}"
        self._set_number("min_tokens", int, 0, most, said)
        self._set_collections()
        is_good = isinstance(self.structured_outputs, StructuredOutputsParams | None)
        self._check(is_good, "structured_outputs", "None or StructuredOutputsParams")
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            found = f"allowed_token_ids={shown(self.allowed_token_ids)}"
            raise ValueError(f"structured_outputs decide which tokens are allowed, got {found} as well")

    def _set_number(self, name: str, kind: type, low: float, high: float, allowed: str) -> None:
        """Check a number, and keep it as Python's own: numpy's may overflow in sums."""
        value = getattr(self, name)
        self._check(is_number(value, kind, low, high), name, allowed)
        setattr(self, name, kind(value))

    def _set_collections(self) -> None:
        """Check the fields that are collections of any kind, and keep them as tuples."""
        given_stop = self.stop
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop)
        texts = "a list of texts, none of them empty or with a lone surrogate"
        self._set_each("stop", stop, _is_text, str, f"a text or {texts}")
        if stop and not self.detokenize:
            message = "stop needs a text to look at, but detokenize is False; got stop="
            raise ValueError(message + shown(given_stop))
        self._set_each("bad_words", _as_tuple(self.bad_words), _is_text, str, texts)
        ids = "a list of token ids"
        self._set_each("stop_token_ids", _as_tuple(self.stop_token_ids), _is_token_id, int, ids)
        if self.allowed_token_ids is not None:
            allowed = _as_tuple(self.allowed_token_ids) or None
            said = f"None or {ids}, which is not empty"
            self._set_each("allowed_token_ids", allowed, _is_token_id, int, said)
        bias = self.logit_bias
        bias = tuple(bias.items()) if isinstance(bias, Mapping) else _as_tuple(bias)
        biases = "a dict of token ids with biases from -100 to 100"
        self._set_each("logit_bias", bias, _is_bias, lambda pair: (int(pair[0]), float(pair[1])), biases)

    def _set_each(
        self, name: str, values: tuple | None, is_good: Callable[[Any], bool], convert: Callable[[Any], Any],
        allowed: str,
    ) -> None:  # fmt: skip
        """Check each value of a collection, and keep them as a tuple."""
        self._check(values is not None, name, allowed)
        for value in values:
            if not is_good(value):
                # A long collection is shortened in the message, so that it may not show the bad value.
                is_alone = value is getattr(self, name)
                self._check(False, name, allowed if is_alone else f"{allowed} (at fault: {shown(value)})")
        setattr(self, name, tuple(map(convert, values)))

    def _check(self, is_good: bool, name: str, allowed: str) -> None:
        check(is_good, f"{name} must be {allowed}", getattr(self, name))


def recommended_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """
    What a checkpoint's generation_config.json recommends: temperature (0 where do_sample is false), top_p,
    top_k, min_p, repetition_penalty and, as max_tokens, max_new_tokens. Raises ValueError for a bad value.
    """
    found = {"max_tokens": generation_config.get("max_new_tokens")}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        found[name] = generation_config.get(name)
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingParams(**{name: value for name, value in found.items() if value is not None})


def _as_tuple(values: Any) -> tuple | None:
    """The collection as a tuple, and None as an empty one. Returns None for anything else."""
    if values is None:
        return ()
    return tuple(values) if isinstance(values, (list, tuple, set, frozenset)) else None


def _read_schema(schema: Any) -> str:
    """A JSON schema as text, from any of its forms."""
    if callable(of_model := getattr(schema, "model_json_schema", None)):
        schema = of_model()
    try:
        if isinstance(schema, Mapping):
            schema = json.dumps(dict(schema), allow_nan=False)
        if isinstance(schema, str) and isinstance(json.loads(schema), dict | bool):
            return schema
        reason = "it is neither an object nor true or false"
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    rule = "json must be a JSON schema, as a dict or text, or a pydantic model class"
    raise ValueError(f"{rule}, got {shown(schema)}: {reason}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and find_surrogate(value) < 0


def _is_token_id(value: Any) -> bool:
    return is_number(value, int, 0)


def _is_bias(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and _is_token_id(value[0])
    return is_pair and is_number(value[1], float, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
