"""The engine's options outside of a call: in help() and completion, as arguments of a command line, and as a
dataclass that scripts for vLLM fill before they call `LLM(**asdict(engine_args))`. It also has what
this project's own programs read their command lines with.
"""

import argparse
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from typing import Any, TypeVar

from nanovllm.config import Config
from nanovllm.extensions.api.foreign_options import OPTIONS, takes_foreign
from nanovllm.sampling_params import SamplingParams

MEANING = re.compile(r"^ *(\w+): +(.*(?:\n {8,}.*)*)", re.MULTILINE)  # of a field, in its class's docstring
Class = TypeVar("Class", bound=type)


def show_options(cls: Class) -> Class:
    """
    Have help() and completion show the options of a class whose `__init__` ends in `**options`: in its
    signature and, as far as Python keeps docstrings, in its own.
    """
    signature = inspect.signature(cls.__init__)
    *parameters, _ = signature.parameters.values()
    for option in OPTIONS[1:]:
        look = dict(default=option.default, annotation=option.type)
        parameters.append(inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, **look))
    cls.__init__.__signature__ = signature.replace(parameters=parameters)
    if cls.__doc__:
        cls.__doc__ = inspect.cleandoc(cls.__doc__) + "\n\n" + inspect.cleandoc(Config.__doc__)
    return cls


def _meaning(cls: type, name: str) -> str:
    """What the docstring says of a field; nothing under python -OO, which drops docstrings."""
    return " ".join(dict(MEANING.findall(cls.__doc__ or "")).get(name, "").split()).rstrip(".")


def command_line_options() -> dict[str, tuple[Callable, str]]:
    """How each option of `LLM` but the model is read, and its help."""
    kinds = {option.name: type(option.default) for option in OPTIONS if option.name != "model"}
    kinds |= {name: str for name, kind in kinds.items() if kind is type(None)}
    kinds |= {"seed": int, "hf_overrides": json.loads}
    return {
        option.name: (kinds[option.name], f"{_meaning(Config, option.name)} (default: {option.default})")
        for option in OPTIONS[1:]
    }


def sampling_options(params: SamplingParams, default: str = "") -> dict[str, tuple[Callable, str]]:
    """The same for how tokens are drawn: as in `params`, unless `default` says what comes before that."""
    found = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {
        name: (type(value), f"{_meaning(SamplingParams, name)} (default: {default}{value})")
        for name, value in found.items()
    }


def add_options(group: Any, options: dict[str, tuple[Callable, str]]) -> None:
    """
    Arguments for these. They are in the result of the parser only where they are given, so that it can be
    passed on as keyword arguments.
    """
    for name, (kind, text) in options.items():
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": "X"}
        group.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **how)


def parse_options(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    about_sampling: str,
    sampling: dict[str, tuple[Callable, str]],
    engine: dict[str, tuple[Callable, str]],
) -> argparse.Namespace:
    """
    Add these options to those of a parser, and parse. In the result `engine` are those for `LLM` that are
    given, and `defaults` those for SamplingParams, checked.
    """
    add_options(parser.add_argument_group("sampling", about_sampling), sampling)
    add_options(parser.add_argument_group("engine", "the options of LLM (docs/options.md)"), engine)
    args = parser.parse_args(argv)
    args.defaults = {name: getattr(args, name) for name in sampling if name in args}
    args.engine = {name: getattr(args, name) for name in engine if name in args}
    SamplingParams(**args.defaults)
    return args


def _add_cli_args(parser: Any) -> Any:
    parser.add_argument("--model", help="folder, .gguf file or hub id")
    add_options(parser, command_line_options())
    return parser


def _from_cli_args(cls: type, args: argparse.Namespace) -> Any:
    return cls(**{option.name: getattr(args, option.name) for option in OPTIONS if option.name in args})


EngineArgs = make_dataclass(
    "EngineArgs",
    [(option.name, option.type, field(default=option.default)) for option in OPTIONS],
    namespace={
        "__doc__": "The options of `LLM` and their defaults, not checked.",
        "__module__": __name__,
        "add_cli_args": staticmethod(_add_cli_args),
        "from_cli_args": classmethod(_from_cli_args),
        "command_line_options": staticmethod(command_line_options),
        "sampling_options": staticmethod(sampling_options),
        "parse_options": staticmethod(parse_options),
    },
)
EngineArgs.__init__ = takes_foreign(EngineArgs.__init__)
