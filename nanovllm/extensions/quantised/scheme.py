"""Which layers of a checkpoint are quantised, and how: what the readers of `quantization_config` make of it.

Configurations are other people's: each field is checked before it is used, and a message names it.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from nanovllm.extensions.quantised.patterns import pattern
from nanovllm.layers.linear import LinearBase, Weight
from nanovllm.utils.validation import check, shown

MAX_GROUP = 2**24
MAX_PATTERNS = 2**12
FLAGS = True, False


class Format(NamedTuple):
    """A class of this folder, and what its objects are made with besides a layer's shards."""

    kind: type
    settings: dict[str, Any]

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.kind.__name__.lower()} ({settings})"


class Scheme(NamedTuple):
    """
    `formats` are all that occur. `find` gives the one of a layer with this name, or None if it is not
    quantised.
    """

    formats: list[Format]
    find: Callable[[str], Format | None]

    @property
    def kinds(self) -> set[str]:
        """The names of the formats: fp8, int8, int4."""
        return {format.kind.__name__.lower() for format in self.formats}

    def make_weight(
        self, dense: Callable[..., Weight], layer: LinearBase, name: str, sources: list[str]
    ) -> Weight:
        """
        The weight of a layer, or what `dense` makes if it is not quantised. Where `dense` has `make_gemv`,
        which makes a product of what multiplies a row or two, so has the weight, as well as its `library`,
        see gguf.py. `sources` are the names of the layer's matrices; raises ValueError if they have different
        formats.
        """
        formats = [self.find(each) for each in sources]
        if formats.count(first := formats[0]) < len(formats):
            stored = (f"{n}: {f or 'not quantised'}" for n, f in zip(sources, formats, strict=True))
            own = name.rpartition(".")[2]
            raise ValueError(f"{own} needs one format for all its parts, got {'; '.join(stored)}")
        if first is None:
            return dense(layer.shards)
        weight = first.kind(layer.shards, **first.settings)
        weight.make_gemv = getattr(dense, "make_gemv", None)
        weight.library = getattr(dense, "library", None)
        return weight


def same_for_all(format: Format, is_excepted: Callable[[str], bool] = lambda name: False) -> Scheme:
    return Scheme([format], lambda name: None if is_excepted(name) else format)


def choose(config: dict[str, Any], field: str, allowed: Iterable[Any], default: Any = None) -> Any:
    """The value of a field, which is one of these. Where it is missing or null it is `default`."""
    value = config.get(field)
    value = default if value is None else value
    allowed = [*allowed]
    if (type(value), value) not in [(type(each), each) for each in allowed]:
        known = ", ".join(map(repr, allowed))
        raise ValueError(f"{field} = {shown(value)} is not supported; supported: {known}")
    return value


def choose_group(config: dict[str, Any]) -> int:
    """`group_size`; 0 if a group is a whole row, which files write as -1."""
    value = config.get("group_size")
    is_size = type(value) is int and (value == -1 or 1 <= value <= MAX_GROUP)
    check(is_size, f"group_size must be -1 or from 1 to {MAX_GROUP}", value)
    return max(value, 0)


def refuse(config: dict[str, Any], *fields: str) -> None:
    """Raise ValueError if any of these fields says something."""
    for field in fields:
        if config.get(field) not in (None, False, [], {}, ""):
            raise ValueError(f"{field} = {shown(config[field])} is not supported")


def names_in(config: dict[str, Any], field: str) -> list[str]:
    """A field that lists names or patterns. Raises ValueError."""
    names = config.get(field)
    names = [] if names is None else names
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    check(is_list, f"{field} must be a list of names", names)
    if len(names) > MAX_PATTERNS:
        raise ValueError(f"{field} has more than {MAX_PATTERNS} entries")
    return names


def listed(config: dict[str, Any], *fields: str) -> Callable[[str], bool]:
    """
    Whether these fields list a layer: by its name, the name of a module that it is in, or the last parts of
    its name, such as "mlp.down_proj".
    """
    matches = []
    for field in fields:
        for name in names_in(config, field):
            if re.fullmatch(r"[\w.]+", name):
                matches.append(re.compile(rf"(?<![^.]){re.escape(name)}(?![^.])").search)
            else:
                matches.append(pattern(field, rf"(?:{name})(?:(?<=\.)|(?=\.|$))", name).match)
    return lambda name: any(match(name) for match in matches)
