"""The engine's options outside of a call: in help() and completion, as arguments of a command line, and as a
dataclass that scripts for vLLM fill before they call `LLM(**asdict(engine_args))`. It also has what
this project's own programs read their command lines with.
"""

import argparse
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Any, TypeVar

from nanovllm.config import Config
from nanovllm.extensions.api.foreign_options import OPTIONS, takes_foreign
from nanovllm.sampling_params import SamplingParams

MEANING = re.compile(r"^ *(\w+): +(.*(?:\n {8,}.*)*)", re.MULTILINE)  # of a field, in its class's docstring
KINDS = {"seed": int, "hf_overrides": json.loads}  # of options whose default does not say it
Class = TypeVar("Class", bound=type)
Options = make_dataclass("Options", [(name, each.type, each.default) for name, each in OPTIONS.items()])


def show_options(cls: Class) -> Class:
    """
    Have help() and completion show the options of a class whose `__init__` ends in `**options`: in its
    signature and, as far as Python keeps docstrings, in its own.
    """
    signature = inspect.signature(cls.__init__)
    *parameters, _ = signature.parameters.values()
    _model, *options = inspect.signature(Options).parameters.values()
    parameters += [option.replace(kind=option.KEYWORD_ONLY) for option in options]
    cls.__init__.__signature__ = signature.replace(parameters=parameters)
    if cls.__doc__:
        cls.__doc__ = inspect.cleandoc(cls.__doc__) + "\n\n" + inspect.cleandoc(Config.__doc__)
    return cls


def _meaning(cls: type, name: str) -> str:
    """What the docstring says of a field; nothing under python -OO, which drops docstrings."""
    return " ".join(dict(MEANING.findall(cls.__doc__ or "")).get(name, "").split()).rstrip(".")


def command_line_options() -> dict[str, tuple[Callable, str]]:
    """How each option of `LLM` but the model is read, and its help."""
    found = {}
    _model, *options = OPTIONS.values()
    for option in options:
        kind = str if option.default is None else type(option.default)
        text = f"{_meaning(Config, option.name)} (default: {option.default})"
        found[option.name] = KINDS.get(option.name, kind), text
    return found


def _add_options(group: Any, options: dict[str, tuple[Callable, str]]) -> None:
    """
    Arguments for these. They are in the result of the parser only where they are given, so that it can be
    passed on as keyword arguments.
    """
    for name, (kind, text) in options.items():
        how = {"type": kind, "metavar": "X"}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, help=text, **how)


class EngineArgs(Options):
    """The options of `LLM` and their defaults, not checked."""

    __init__ = takes_foreign(Options.__init__)

    @staticmethod
    def parse_options(
        parser: argparse.ArgumentParser,
        argv: Sequence[str] | None,
        about_sampling: str,
        sampling: dict[str, tuple[Callable, str]],
        temperature: float = 1.0,
        usual: str = "",
    ) -> argparse.Namespace:
        """
        Add options to those of a parser, and parse: `sampling` and others for how tokens are drawn, of which
        help says that SamplingParams' defaults (and this temperature) hold unless there is what is `usual`;
        and those of `LLM` that have other names. In the result `engine` are the options for `LLM` that are
        given, and `defaults` those for SamplingParams, checked.
        """
        sampling = dict(sampling)
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = getattr(SamplingParams(temperature), name)
            sampling[name] = type(value), f"{_meaning(SamplingParams, name)} (default: {usual}{value})"
        engine = {name: option for name, option in command_line_options().items() if name not in sampling}
        _add_options(parser.add_argument_group("sampling", about_sampling), sampling)
        _add_options(parser.add_argument_group("engine", "the options of LLM (docs/options.md)"), engine)
        args = parser.parse_args(argv)
        args.defaults = {name: getattr(args, name) for name in sampling if name in args}
        args.engine = {name: getattr(args, name) for name in engine if name in args}
        SamplingParams(**args.defaults)
        return args

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        parser.add_argument("--model", help="folder, .gguf file or hub id")
        _add_options(parser, command_line_options())
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        return cls(**{name: getattr(args, name) for name in OPTIONS if name in args})
