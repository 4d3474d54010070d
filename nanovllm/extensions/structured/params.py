"""What a request says of the form of its completion."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import SamplingParams, as_tuple, is_text
from nanovllm.utils.validation import check, check_bool, shown

MAX_CHARACTERS = 2**20  # of a schema, a grammar, a regular expression, all choices


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
            is_good = value is None or is_text(value)
            check(is_good, f"{name} must be a text, not empty or with a lone surrogate", value)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            found = f"whitespace_pattern={shown(self.whitespace_pattern)}"
            raise ValueError(f"disable_any_whitespace leaves no white space, got {found} as well")
        if self.choice is not None:
            texts = as_tuple(self.choice) or ()
            rule = "choice must be a list of texts, none of them empty or with a lone surrogate"
            check(texts != () and all(map(is_text, texts)), rule, self.choice)
            object.__setattr__(self, "choice", texts)
        for name in ("json", "regex", "choice", "grammar", "whitespace_pattern"):
            value = getattr(self, name) or ""
            size = len(value) if isinstance(value, str) else sum(map(len, value))
            if size > MAX_CHARACTERS:
                raise ValueError(f"{name} must have at most {MAX_CHARACTERS:,} characters, got {size:,}")


def check_structured_outputs(params: SamplingParams) -> None:
    """The check of this field of SamplingParams."""
    is_good = isinstance(params.structured_outputs, StructuredOutputsParams | None)
    params.check(is_good, "structured_outputs", "None or StructuredOutputsParams")
    if params.structured_outputs is not None and params.allowed_token_ids is not None:
        found = f"allowed_token_ids={shown(params.allowed_token_ids)}"
        raise ValueError(f"structured_outputs decide which tokens are allowed, got {found} as well")


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
