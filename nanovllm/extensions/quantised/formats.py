"""How weights are stored in fewer bits: one file for each format in memory.

A format's object has a layer's weight: it says what checkpoints have of it (`stored`), takes this rank's part
(see scaled.py), and multiplies (`multiply`). Models and layers know nothing else of it.
"""

from typing import Any

from nanovllm.extensions.quantised.bitsandbytes import read_bitsandbytes
from nanovllm.extensions.quantised.compressed_tensors import read_compressed_tensors
from nanovllm.extensions.quantised.fp4 import Mxfp4, read_mxfp4
from nanovllm.extensions.quantised.fp8 import make_fp8, read_fp8, read_modelopt
from nanovllm.extensions.quantised.gguf import read_gguf
from nanovllm.extensions.quantised.gptq import make_int4, read_awq, read_gptq
from nanovllm.extensions.quantised.integers import Int4
from nanovllm.extensions.quantised.kernels.fp8_linear import GROUP
from nanovllm.extensions.quantised.scaled import FLOATS
from nanovllm.extensions.quantised.scheme import Scheme, choose

# From the `quant_method` of a checkpoint's `quantization_config` to what reads the rest of it.
READERS = {
    "fp8": read_fp8,
    "modelopt": read_modelopt,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "auto-round": read_gptq,
    "awq": read_awq,
    "gguf": read_gguf,
    "mxfp4": read_mxfp4,
    "bitsandbytes": read_bitsandbytes,
}
# From the option `quantization` to what is made of weights that are not quantised.
MAKERS = {"fp8": make_fp8, "int4": make_int4}
ACTIVATIONS = "activation_dtype"  # the engine's option, in a `quantization_config` unless it is "auto"


def read_scheme(config: dict[str, Any] | None, option: str | None) -> Scheme | None:
    """
    How the weights are quantised, or None: as a checkpoint's `quantization_config` says, or else the option.
    Raises ValueError naming the field that asks for what is not supported.
    """
    if config and ACTIVATIONS in config:
        rest = {field: value for field, value in config.items() if field != ACTIVATIONS}
        return with_rounded_inputs(read_scheme(rest or None, option))
    if config is None or (option is not None and config.get("quant_method") == "gguf"):
        return MAKERS[option]() if option is not None else None
    try:
        scheme = READERS[choose(config, "quant_method", READERS)](config)
    except ValueError as error:
        raise ValueError(f"quantization_config: {error}") from None
    if option is not None and scheme.kinds != {option}:
        stored = ", ".join(sorted(scheme.kinds))
        raise ValueError(f"quantization={option!r}: the checkpoint is quantised already, as {stored}")
    return scheme


def with_rounded_inputs(scheme: Scheme | None) -> Scheme:
    """The scheme whose int4 and MXFP4 weights have their inputs rounded to 8 bits. Raises ValueError."""
    formats = [format for format in scheme.formats if format.kind in (Int4, Mxfp4)] if scheme else []
    if not formats:
        raise ValueError(
            "activation_dtype='fp8' is for weights in int4 and experts in MXFP4, which the model lacks"
        )
    for format in formats:
        format.settings["rounds_inputs"] = True
        if format.settings["source"] is FLOATS:
            format.settings["stored_tile"] = (1, GROUP)
    return scheme
