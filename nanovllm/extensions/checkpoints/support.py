"""
Says what each MODEL is (a folder, a .gguf file or a hub id), whether it loads, how its weights are kept and
how much memory they take, with the options that an engine has by default. No weight is read: of a hub id the
configuration and the headers of files are fetched. A model that the engine refuses is refused in the same
words, and the exit status is then 1.

The engine's own code opens, builds and loads the model, on torch's meta device: tensors have shapes, dtypes
and no values.
"""

import argparse
import math
import os
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.extensions.checkpoints import gguf, hub
from nanovllm.extensions.checkpoints.names import MadeTensor
from nanovllm.layers.linear import DenseWeight, LinearBase, Weight
from nanovllm.llm import LLM
from nanovllm.utils.loader import load_model
from nanovllm.utils.torch_defaults import torch_defaults

META = torch.device("meta")
UNREADABLE = "weight_shape", "weight.quant_state.bitsandbytes__nf4"  # are compared by value


def unread(tensor: Any) -> Any:
    """A tensor of a file without its values; itself if it is of a dtype or a size that no weight has."""
    try:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
    except (ValueError, RuntimeError):
        return tensor
    found = MadeTensor(tensor.file, tensor.name, value)
    if hasattr(tensor, "encoded"):  # of a GGUF file
        found.encoded = np.zeros(tensor.encoded.shape, np.uint8)
    return found


class GoodValues(TorchFunctionMode):
    """What loaders ask of values, which tensors on the meta device do not have: are they finite, 0, equal?"""

    answers = {Tensor.__float__: 1.0, Tensor.__bool__: False, torch.equal: True}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self.answers.get(function)
        return function(*args, **kwargs or {}) if answer is None else answer


def describe(name: str) -> list[str]:
    """Lines about a model. Raises what an engine raises that is to load it."""
    place, options, headers = name, {}, None
    if not os.path.exists(name):
        if hub.HUB_GGUF.fullmatch(name):
            raise ValueError(f"a GGUF file on the hub is described when it is on this machine: {name}")
        if hub.HUB_ID.fullmatch(name):
            headers = hub.read_headers(name)
            place, options = hub.download(name, False, hub.CONFIGS), {"load_format": "dummy"}
    config, checkpoint = LLM.open_model(place, options)
    runner, ranks = build(config), []
    for size in (1, 2, 4, 8):
        split = replace(config, device="cpu", tensor_parallel_size=size)  # however many GPUs there are
        with suppress(ValueError):
            build(split.with_checkpoint(checkpoint))
            ranks.append(str(size))
    model = runner.model
    if headers is None:
        headers = [*checkpoint.tensors()]
    if headers:
        load_shapes(model, config, checkpoint, headers)
    checkpoint.eos_token_ids(checkpoint.tokenizer())
    kinds, count, num_bytes = measure(model, config)
    theirs = getattr(model.lm_head, "model", None)  # what transformers has built
    token_bytes = runner.kv_cache.block_bytes // config.kvcache_block_size
    lengths = dict.fromkeys((config.max_model_len, config.hf_config.context_limit))
    caches = (f", {length * token_bytes / 1e9:.2f} GB for {length:,}" for length in lengths)
    lines = [
        f"model     {checkpoint.fields().get('model_type')}, {config.hf_config.num_hidden_layers} layers, "
        f"{count / 1e9:.3f} billion parameters",
        f"class     {type(theirs or model).__name__} of {'transformers' if theirs else 'this project'}",
        f"weights   {kinds}: {8 * num_bytes / count:.1f} bits each, {num_bytes / 1e9:.2f} GB",
        f"KV cache  {token_bytes:,} bytes a token{''.join(caches)}",
        f"ranks     {', '.join(ranks)}",
    ]
    if not headers:
        lines.append("tensors   not compared, since the hub gives no headers")
    return lines


def build(config: Config) -> ModelRunner:
    """The first rank's. Raises ValueError if the model cannot be built."""
    runner = ModelRunner(config, LLM.assembly(config), Group(0, config.tensor_parallel_size), device=META)
    runner.build()
    return runner


def load_shapes(model: nn.Module, config: Config, checkpoint: Checkpoint, tensors: list[Any]) -> None:
    """Raises ValueError for a tensor that is missing, has no place, or has another shape or dtype."""
    stored = Checkpoint(checkpoint.path)
    stored.tensors = [each for each in tensors if not each.name.endswith(UNREADABLE)].copy
    stored.changes = [*checkpoint.changes]
    first = isinstance(checkpoint, gguf.GGUFCheckpoint)  # behind what names a file's tensors
    stored.changes.insert(first, lambda tensors, *_: map(unread, tensors))
    for matrix in matrices_of(model):
        matrix.library = None  # it packs values
        for name in UNREADABLE:
            vars(matrix).get("stored", {}).pop(name, None)
    with torch_defaults(config.torch_dtype, META), GoodValues():
        load_model(model, stored)


def matrices_of(model: nn.Module) -> list[Weight]:
    return [layer.matrix for layer in model.modules() if isinstance(layer, LinearBase)]


def measure(model: nn.Module, config: Config) -> tuple[str, int, float]:
    """How weights are kept, how many there are, and their bytes: of GGUF's types, those in the file."""
    matrices = matrices_of(model)
    params = {*model.parameters()}
    others = params.difference(*(matrix.parameters.values() for matrix in matrices))
    count = sum(math.prod(matrix.shape) for matrix in matrices) + sum(map(Tensor.numel, others))
    kinds = {type(each).__name__.lower() for each in matrices if not isinstance(each, DenseWeight)}
    num_bytes = sum(param.nbytes for param in params)
    if "gguf" in kinds:
        stored = config.hf_config.quantization_config
        num_bytes += stored["num_weights"] * stored["bits_per_weight"] / 8
        kinds = {"gguf (bytes as in the file)"}
    return ", ".join([*sorted(kinds), str(config.torch_dtype)[6:]]), count, num_bytes


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m nanovllm.extensions.checkpoints.support", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as in LLM(MODEL)")
    status = 0
    for name in parser.parse_args().models:
        try:
            lines = describe(name)
        except (ValueError, OSError, ImportError) as error:
            status, lines = 1, [f"refused: {error}"]
        print(name, *lines, sep="\n  ")
    return status


if __name__ == "__main__":
    sys.exit(main())
