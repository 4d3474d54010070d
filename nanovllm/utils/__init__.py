"""Small tools, and what scripts for vLLM import from here."""

from nanovllm.extensions.api.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
