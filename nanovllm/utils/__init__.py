"""Small tools, and what scripts for vLLM import from here."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "FlexibleArgumentParser":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nanovllm.extensions.api.argparse_utils import FlexibleArgumentParser

    return FlexibleArgumentParser
