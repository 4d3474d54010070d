"""How weights are stored in fewer bits: one file for each format in memory.

A format's object has a layer's weight: it says what checkpoints have of it (`stored`), takes this rank's part
(see scaled.py), and multiplies (`multiply`). Models and layers know nothing else of it.
"""

from typing import Any

from nanovllm.extensions.quantised.bitsandbytes import read_bitsandbytes
from nanovllm.extensions.quantised.compressed_tensors import read_compressed_tensors
from nanovllm.extensions.quantised.fp4 import ACTIVATIONS, read_mxfp4
from nanovllm.extensions.quantised.fp8 import make_fp8, read_fp8, read_modelopt
from nanovllm.extensions.quantised.gguf import read_gguf
from nanovllm.extensions.quantised.gptq import make_int4, read_awq, read_gptq
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


def read_scheme(config: dict[str, Any] | None, option: str | None) -> Scheme | None:
    """
    How the weights are quantised, or None: as a checkpoint's `quantization_config` says, or else the option.
    Raises ValueError naming the field that asks for what is not supported.
    """
    is_mxfp4 = config and (config.get("quant_method") == "mxfp4" or config.get("has_mxfp4_experts"))
    if config and ACTIVATIONS in config and not is_mxfp4:
        raise ValueError("activation_dtype='fp8' is for experts in MXFP4, which the model does not have")
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
