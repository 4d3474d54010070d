"""What the configurations of GPTQ, AutoRound and AWQ say: integers of 4 or 8 bits; and some made here."""

import re
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.extensions.quantised.integers import Int4, Int8
from nanovllm.extensions.quantised.patterns import pattern
from nanovllm.extensions.quantised.scaled import FLOATS, Source
from nanovllm.extensions.quantised.scheme import (
    FLAGS,
    MAX_PATTERNS,
    Format,
    Scheme,
    choose,
    choose_group,
    listed,
    names_in,
    refuse,
    same_for_all,
)
from nanovllm.utils.validation import check, shown

MATRICES = {"qweight": "codes", "scales": "scales", "qzeros": "zeros"}
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ has each of eight outputs in an integer
AWQ = Source("awq", MATRICES, torch.int32, order=AWQ_ORDER, turn=-1)
GPTQ = Source("gptq", MATRICES | {"g_idx": "order", "bias": "no_bias"}, torch.int32, axis=0, turn=-1)
MADE_GROUP = 32  # of inputs, where the weights are quantised here


def read_gptq(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of GPTQ or AutoRound says. Raises ValueError naming the field."""
    kind = {4: Int4, 8: Int8}[choose(config, "bits", [4, 8])]
    is_auto_round = config["quant_method"] == "auto-round"
    choose(config, "packing_format", ["auto_round:auto_gptq"] if is_auto_round else [None])
    # Version 1, which AutoRound writes too, holds zero points less 1.
    version = choose(config, "checkpoint_format", ["gptq", "gptq_v2"], "gptq")
    settings = {
        "stored_tile": (1, choose_group(config)),
        "source": GPTQ._replace(added_to_zeros=1 if version == "gptq" else 0),
        "is_symmetric": choose(config, "sym", FLAGS, True),
        "has_order": choose(config, "desc_act", FLAGS, False),
    }
    refuse(config, "lm_head", "is_marlin_format")
    return same_for_all(Format(kind, settings), _exceptions(config))


def _exceptions(config: dict[str, Any]) -> Callable[[str], bool]:
    """Which layers GPTQ's or AutoRound's fields leave out."""
    rules = config.get("dynamic") or config.get("extra_config") or {}
    is_object = isinstance(rules, dict) and len(rules) <= MAX_PATTERNS
    check(is_object, "dynamic and extra_config must be objects", rules)
    left_out, plain = [], set()
    for name, rule in rules.items():
        if name.startswith("-:"):
            left_out.append(pattern("dynamic", name[2:], name[2:]).match)
        elif isinstance(rule, dict) and rule.get("bits") == 16 and re.fullmatch(r"[\w.]+", name):
            plain.add(name)
        else:
            raise ValueError(f"dynamic or extra_config: {shown({name: rule})} is not supported")
    inside = config.get("modules_in_block_to_quantize") or []
    if isinstance(inside, list) and all(isinstance(names, list) for names in inside):
        inside = [name for names in inside for name in names]  # those of one step of quantisation
    inside = names_in({"modules_in_block_to_quantize": inside}, "modules_in_block_to_quantize")
    inside = tuple(f".{name}" for name in inside)
    return lambda name: (
        name in plain or bool(inside and not name.endswith(inside)) or any(match(name) for match in left_out)
    )


def read_awq(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of AWQ says. Raises ValueError naming the field."""
    choose(config, "bits", [4])
    choose(config, "version", ["gemm", "GEMM"], "gemm")
    choose(config, "zero_point", [True], True)
    settings = {"stored_tile": (1, choose_group(config)), "source": AWQ, "is_symmetric": False}
    return same_for_all(Format(Int4, settings), listed(config, "modules_to_not_convert"))


def make_int4() -> Scheme:
    """Symmetric groups of inputs."""
    return same_for_all(Format(Int4, {"stored_tile": (1, MADE_GROUP), "source": FLOATS}))
