"""The engine's options outside of a call: as arguments of a command line, and as a dataclass that scripts for
vLLM fill before they call `LLM(**asdict(engine_args))`.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from typing import Any

from nanovllm.config import FILLED_IN, Config

OPTIONS = [option for option in fields(Config) if option.name not in FILLED_IN]


def command_line_options() -> dict[str, tuple[Callable, str]]:
    """How each option of `LLM` but the model is read, and its help."""
    kinds = {option.name: type(option.default) for option in OPTIONS if option.name != "model"}
    kinds |= {name: str for name, kind in kinds.items() if kind is type(None)}
    kinds |= {"seed": int, "hf_overrides": json.loads}
    return {option.name: (kinds[option.name], f"default: {option.default}") for option in OPTIONS[1:]}


def add_options(group: Any, options: dict[str, tuple[Callable, str]]) -> None:
    """
    Arguments for these. They are in the result of the parser only where they are given, so that it can be
    passed on as keyword arguments.
    """
    for name, (kind, text) in options.items():
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": "X"}
        group.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **how)


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
    },
)
