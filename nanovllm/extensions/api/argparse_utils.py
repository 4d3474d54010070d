"""A parser that scripts for vLLM expect under this name."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

NAME = re.compile("^--[^=]+")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Options may be written with underscores as well."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else args
        written = [NAME.sub(lambda name: name[0].replace("_", "-"), argument) for argument in given]
        return super().parse_known_args(written, namespace)
