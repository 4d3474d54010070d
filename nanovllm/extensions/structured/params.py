"""What a request says of the form of its completion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import check, shown


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

    check: ClassVar[Callable[["StructuredOutputsParams"], dict[str, Any]]]  # of extensions/safety

    def __post_init__(self) -> None:
        for name, value in self.check().items():
            object.__setattr__(self, name, value)


def check_structured_outputs(params: SamplingParams) -> None:
    """The check of this field of SamplingParams."""
    given = params.structured_outputs
    is_good = isinstance(given, StructuredOutputsParams | None)
    check(is_good, "structured_outputs must be None or StructuredOutputsParams", given)
    if given is not None and params.allowed_token_ids is not None:
        found = f"allowed_token_ids={shown(params.allowed_token_ids)}"
        raise ValueError(f"structured_outputs decide which tokens are allowed, got {found} as well")
