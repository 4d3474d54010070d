"""A parser that scripts for vLLM expect under this name."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Options may be written with underscores as well."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        written = []
        for argument in sys.argv[1:] if args is None else args:
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            written.append(name + equals + value)
        return super().parse_known_args(written, namespace)
