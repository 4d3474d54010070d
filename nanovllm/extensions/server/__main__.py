"""The command `nanovllm`, which is also `python -m nanovllm`. Each of its commands reads its own options."""

import functools
import io
import os
import runpy
import sys
from collections.abc import Sequence

from nanovllm import __version__
from nanovllm.extensions.server.terminal import chat, generate

HELP = """\
usage: nanovllm COMMAND [OPTION ...]

  chat       a conversation in the terminal
  generate   continue texts
  batch      answer a file of prompts
  bench      measure how fast the engine is

nanovllm COMMAND --help says every option of a command, and nanovllm --version which version this is."""


def run_module(name: str, argv: Sequence[str]) -> None:
    """Run a module as a program of its own, which reads its options from the command line."""
    sys.argv = [f"nanovllm {name.rpartition('.')[2]}", *argv]
    runpy.run_module(name, run_name="__main__")


COMMANDS = {
    "chat": chat,
    "generate": generate,
    "batch": functools.partial(run_module, "nanovllm.batch"),
    "bench": functools.partial(run_module, "nanovllm.extensions.bench"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """
    Errors that a user can cause or correct are one line each. The exit code is 1 after one, 2 after a wrong
    command line and 130 after Ctrl-C.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(HELP)
    elif name == "--version":
        print(f"nanovllm {__version__}")
    elif name not in COMMANDS:
        print(f"nanovllm: there is no command {name!r}\n{HELP}", file=sys.stderr)
        sys.exit(2)
    else:
        _run(name, rest)


def _run(name: str, argv: Sequence[str]) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal need not know every character
    try:
        COMMANDS[name](argv)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's last flush fails
        sys.exit(1)
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        sys.exit(f"nanovllm {name}: {str(error) or type(error).__name__}")
    except KeyboardInterrupt:
        print(f"nanovllm {name}: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
