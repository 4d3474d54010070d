"""JSON schemas: forbids the properties that a schema does not list. Knows nothing of llguidance.

By the standard an object may have any others, which is seldom meant: a model goes on with them to max_tokens.
"""

from typing import Any
from urllib.parse import unquote

# Where a schema has others, which describe parts of a value, or nothing by themselves.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
OTHERS = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "propertyNames")
LISTING = ("properties", "patternProperties")
ALLOWING = ("additionalProperties", "unevaluatedProperties")


def close_objects(root: Any) -> None:
    """
    Add `"additionalProperties": false` to every object schema that lists properties and says nothing of
    others, in place. Schemas that describe an object together stay as they are: none knows the others' list.
    """
    listing: list[dict] = []
    seen: set[tuple[int, bool]] = set()  # id of a schema, and whether it is one of several
    left: list[tuple[Any, bool]] = [(root, False)]
    while left:
        schema, is_part = left.pop()
        if isinstance(schema, list):
            left.extend((each, is_part) for each in schema)
        if not isinstance(schema, dict):
            continue
        is_listing = any(name in schema for name in LISTING)
        # What describes the same value as the schema itself.
        every = schema.get("allOf")
        merged = [*every] if isinstance(every, list) else []
        merged += [schema.get("anyOf"), schema.get("oneOf"), _resolve(root, schema.get("$ref"))]
        merged = [each for each in merged if each is not None]
        is_part = is_part or is_listing + len(merged) > 1
        if (id(schema), is_part) in seen:
            continue
        seen.add((id(schema), is_part))
        left.append((merged, is_part))
        for name in NAMED:
            named = schema.get(name)
            left.append(([*named.values()] if isinstance(named, dict) else named, False))
        left += [(schema.get(name), False) for name in OTHERS]
        if is_listing and not any(name in schema for name in ALLOWING):
            listing.append(schema)
    for schema in listing:
        if (id(schema), True) not in seen:
            schema["additionalProperties"] = False


def _resolve(root: Any, reference: Any) -> Any:
    """What a JSON pointer into the same schema refers to; None if there is nothing."""
    if not str(reference).startswith("#"):
        return None
    found = root
    try:
        for key in unquote(reference[1:]).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            found = found[int(key) if isinstance(found, list) else key]
    except (LookupError, TypeError, ValueError):
        return None
    return found
