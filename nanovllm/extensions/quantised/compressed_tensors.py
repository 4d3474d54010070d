"""What the configuration of compressed-tensors says: groups of layers, each with its own format."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from nanovllm.extensions.quantised.fp4 import MODELOPT_NVFP4, MXFP4_GROUP, NVFP4_GROUP, Fp4
from nanovllm.extensions.quantised.fp8 import AUTO_FP8, BLOCK, Fp8
from nanovllm.extensions.quantised.integers import Int4, Int8
from nanovllm.extensions.quantised.patterns import pattern
from nanovllm.extensions.quantised.scaled import IGNORED, ONE_TILE, SCALES, Source
from nanovllm.extensions.quantised.scheme import (
    FLAGS,
    Format,
    Scheme,
    choose,
    choose_group,
    names_in,
    refuse,
)
from nanovllm.utils.validation import check

PACKS = {"weight_packed": "codes", "weight_scale": "scales", **IGNORED}
OF_INTEGERS = {"weight_zero_point": "zeros", "weight_shape": "shape", "weight_g_idx": "order"}
FLOATS = AUTO_FP8._replace(name="float-quantized", scale_dtypes=SCALES)
INTEGERS = Source("int-quantized", FLOATS.tensors | {"weight_zero_point": "zeros"})
PACKED = Source("pack-quantized", PACKS | OF_INTEGERS, torch.int32)
NVFP4 = MODELOPT_NVFP4._replace(
    name="nvfp4-pack-quantized", tensors=PACKS | {"weight_global_scale": "factor"}
)
MXFP4 = NVFP4._replace(
    name="mxfp4-pack-quantized",
    tensors=PACKS,
    scale_dtypes={torch.uint8},
    scales_of=lambda exponents: (exponents.float() - 127).exp2(),
)
# By the format and the type of numbers.
SOURCES = {
    "float-quantized": {"float": FLOATS},
    "int-quantized": {"int": INTEGERS},
    "naive-quantized": {"int": INTEGERS, "float": FLOATS},
    "pack-quantized": {"int": PACKED},
    "nvfp4-pack-quantized": {"float": NVFP4},
    "mxfp4-pack-quantized": {"float": MXFP4},
}
# Of formats with 4-bit floating point.
STRATEGIES = {NVFP4.name: ("tensor_group", NVFP4_GROUP), MXFP4.name: ("group", MXFP4_GROUP)}
CLASS = "Linear"  # what transformers calls our layers


def read_compressed_tensors(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` says. Raises ValueError naming the field."""
    refuse(config, "transform_config")
    sparsity = config.get("sparsity_config")
    if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
        refuse(config, "sparsity_config")
    groups = config.get("config_groups")
    are_objects = isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values())
    check(groups and are_objects, "config_groups must be an object of objects", groups)
    formats: dict[str, Format] = {}
    for name, group in groups.items():
        try:
            formats |= dict.fromkeys(names_in(group, "targets"), _read_group(config, group))
        except ValueError as error:
            raise ValueError(f"config_groups.{name}.{error}") from None
    find_ignored, find_target = _finder("ignore", names_in(config, "ignore")), _finder("targets", formats)

    def find(name: str) -> Format | None:
        return None if find_ignored(name) else formats.get(find_target(name) or CLASS)

    return Scheme([*formats.values()], find)


def _finder(field: str, targets: Iterable[str]) -> Callable[[str], str | None]:
    """Which of the targets is a layer's name, or else the first pattern of it in the order of their texts."""
    names = set(targets)
    patterns = {name: pattern(field, name[3:], name[3:]) for name in sorted(names) if name.startswith("re:")}

    def find(name: str) -> str | None:
        if name in names:
            return name
        return next((each for each in patterns if patterns[each].match(name)), None)

    return find


def _read_group(config: dict[str, Any], group: dict[str, Any]) -> Format:
    format = choose({"format": group.get("format") or config.get("format")}, "format", SOURCES)
    weights = group.get("weights")
    check(isinstance(weights, dict), "weights must be an object", weights)
    try:
        return _read_weights(format, weights)
    except ValueError as error:
        raise ValueError(f"weights.{error}") from None


def _read_weights(format: str, weights: dict[str, Any]) -> Format:
    kind = choose(weights, "type", SOURCES[format], "int")
    source = SOURCES[format][kind]
    refuse(weights, "dynamic")
    if format in STRATEGIES:
        strategy, group = STRATEGIES[format]
        for field, value in {"num_bits": 4, "strategy": strategy, "group_size": group}.items():
            choose(weights, field, [value])
        choose(weights, "symmetric", [True], True)
        return Format(Fp4, {"stored_tile": (1, group), "source": source})
    bits = choose(weights, "num_bits", [4, 8] if source is PACKED else [8], 8)
    tiles = {"tensor": ONE_TILE, "channel": (1, 0), "group": (1, 0)}
    if kind == "float":
        tiles["block"] = tuple(BLOCK)
    strategy = choose(weights, "strategy", tiles)
    tile = (1, choose_group(weights)) if strategy == "group" else tiles[strategy]
    if strategy == "block":
        choose(weights, "block_structure", [BLOCK])
    settings = {"stored_tile": tile, "source": source}
    orders = [None, False, "static", "weight", *(["group", "dynamic"] if bits == 4 else [])]
    order = choose(weights, "actorder", orders)
    is_symmetric = choose(weights, "symmetric", [True] if kind == "float" else FLAGS, True)
    if kind == "float":
        return Format(Fp8, settings)
    settings |= {"is_symmetric": is_symmetric, "has_order": order in ("group", "dynamic")}
    return Format(Int8 if bits == 8 else Int4, settings)
