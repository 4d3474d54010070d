"""Checks of what requests say of the form of their completions."""

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.extensions.safety.sampling_checks import as_tuple, is_text
from nanovllm.utils.validation import check, check_bool, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHARACTERS = 2**20  # of a schema, a grammar, a regular expression, all choices


def check_form(wanted: Any) -> dict[str, Any]:
    """The fields of StructuredOutputsParams that are kept in another form. Raises ValueError."""
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        check_bool(getattr(wanted, name), name)
    given = {kind: value for kind in KINDS if (value := getattr(wanted, kind)) is not None}
    if "json_object" in given and not check_bool(given["json_object"], "json_object"):
        del given["json_object"]
    check(len(given) == 1, f"structured outputs need exactly one of {', '.join(KINDS)}", given)
    kept: dict[str, Any] = {}
    if "json" in given:
        kept["json"] = _read_schema(wanted.json)
    if "choice" in given:
        kept["choice"] = as_tuple(wanted.choice)
        rule = "choice must be a list of texts, none of them empty or with a lone surrogate"
        check(bool(kept["choice"]) and all(map(is_text, kept["choice"])), rule, wanted.choice)
    for name in ("regex", "grammar", "whitespace_pattern"):
        if (value := getattr(wanted, name)) is not None:
            check(is_text(value), f"{name} must be a text, not empty or with a lone surrogate", value)
            kept[name] = value
    if wanted.disable_any_whitespace and wanted.whitespace_pattern is not None:
        found = f"whitespace_pattern={shown(wanted.whitespace_pattern)}"
        raise ValueError(f"disable_any_whitespace leaves no white space, got {found} as well")
    for name, value in kept.items():
        if (size := len("".join(value))) > MAX_CHARACTERS:
            raise ValueError(f"{name} must have at most {MAX_CHARACTERS:,} characters, got {size:,}")
    return kept | {"json_object": given.get("json_object")}


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
