"""Opens checkpoints as an engine with these options does."""

import os
from typing import Any

from nanovllm import assembly
from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.extensions.safety.options import ExtendedConfig


def open_checkpoint(model: str | os.PathLike, load_format: str = "auto", **options: Any) -> Checkpoint:
    return assembly.open_checkpoint(ExtendedConfig(model, load_format=load_format, **options))
