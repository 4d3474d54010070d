"""From a configuration to the parts of an engine, which are the core's own.

With the folder `extensions` there is more to choose from: extensions/assembly.py, whose `extend` gives the
engine other functions in place of these two.
"""

from pathlib import Path
from typing import Any

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.checkpoints.folder import FolderCheckpoint
from nanovllm.config import Config
from nanovllm.distributed.ranks import Ranks
from nanovllm.engine.interfaces import Parts
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.kernels.cache_layout import CacheLayout
from nanovllm.layers.attention import get_backend
from nanovllm.models.qwen3 import Qwen3ForCausalLM

if Path(__file__).with_name("extensions").joinpath("assembly.py").exists():
    from nanovllm.extensions.assembly import extend
else:

    def extend(llm: type[LLMEngine]) -> type[LLMEngine]:
        return llm


def open_model(model: str, options: dict[str, Any]) -> tuple[Config, Checkpoint]:
    """What the arguments of an engine say, completed by the folder that they name; and that, opened."""
    config = Config(model, **options)
    checkpoint = FolderCheckpoint(config.model)
    return config.with_checkpoint(checkpoint), checkpoint


def assemble(config: Config) -> Parts:
    """The parts of one rank."""
    return Parts(Qwen3ForCausalLM, make_layout, get_backend, Ranks)


def make_layout(config: Config) -> CacheLayout:
    """Keys and values lie in the cache as they are."""
    return CacheLayout(config.kv_cache_torch_dtype)
