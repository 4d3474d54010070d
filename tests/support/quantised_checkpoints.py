"""Small packers of every format of quantised weights, and for each a reference that unpacks it again:
compressed-tensors' own code for its formats, transformers' for fp8, and a few lines for GPTQ and AWQ.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
QUANTISED = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj w1 w2 w3".split()
QUANTISED += "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj".split()
E4M3 = torch.float8_e4m3fn


@dataclass
class Packer:
    """
    `config` is the quantization_config, `pack` turns a matrix into a checkpoint's tensors by the ends of
    their names, and `unpack` turns these into the matrix that they mean, in float32.
    """

    config: dict[str, Any]
    pack: Callable[[torch.Tensor], Tensors]
    unpack: Callable[[Tensors], torch.Tensor]
    bits: int = field(default=8)


# --- floating point ---


def tiles_of(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows of tiles, rows of a tile, columns of tiles, columns of a tile], filled up with zeros."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    padded = F.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, -1, columns)


def to_fp8(
    weight: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales [rows of tiles, columns of tiles] of this dtype."""
    tiles = tiles_of(weight.float(), rows, columns)
    scales = (tiles.abs().amax((1, 3)) / 448).clamp_min(1e-12)
    if dtype == torch.float8_e8m0fnu:
        scales = scales.log2().ceil().exp2()
    scales = scales.to(dtype)
    codes = (tiles / scales.float()[:, None, :, None]).clamp_(-448, 448).to(E4M3)
    codes = codes.view(tiles.shape[0] * tiles.shape[1], -1)
    return codes[: weight.shape[0], : weight.shape[1]].contiguous(), scales


def fp8(
    block: list[int] | None, dtype: torch.dtype = torch.float32, is_auto_fp8: bool = False, **config
) -> Packer:
    config = {"quant_method": "fp8"} | ({} if is_auto_fp8 else {"weight_block_size": block}) | config
    scale_name = "weight_scale" if is_auto_fp8 else "weight_scale_inv"

    def pack(weight: torch.Tensor) -> Tensors:
        codes, scales = to_fp8(weight, *(block or (0, 0)), dtype)
        packed = {"weight": codes, scale_name: scales if block else scales.view(())}
        if config.get("activation_scheme") == "static":
            packed["input_scale"] = torch.tensor(0.5)
        return packed

    def unpack(packed: Tensors) -> torch.Tensor:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # transformers 5 or newer

        codes, scales = packed["weight"], packed[scale_name]
        height, width = codes.shape
        if block:  # transformers wants whole blocks
            codes = F.pad(codes.view(torch.uint8), (0, -width % block[1], 0, -height % block[0])).view(E4M3)
        whole = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        return whole[:height, :width]

    return Packer(config, pack, unpack)


def modelopt(algorithm: str, **config) -> Packer:
    tile = (1, 0) if "channel" in algorithm.lower() else (0, 0)

    def pack(weight: torch.Tensor) -> Tensors:
        codes, scales = to_fp8(weight, *tile, torch.float32)
        scales = scales.view(-1) if tile[0] else scales.view(())
        return {"weight": codes, "weight_scale": scales, "input_scale": torch.tensor(0.5)}

    def unpack(packed: Tensors) -> torch.Tensor:
        return packed["weight"].float() * packed["weight_scale"].view(-1, 1)

    return Packer({"quant_method": "modelopt", "quant_algo": algorithm, **config}, pack, unpack)


# --- integers ---


def to_integers(
    weight: torch.Tensor, bits: int, group: int, is_symmetric: bool, dtype: torch.dtype, rows: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on [out, in], scales of this dtype and zero points [out, groups], which fit best."""
    tiles = tiles_of(weight.float(), rows, group)
    low, high = tiles.amin((1, 3), keepdim=True), tiles.amax((1, 3), keepdim=True)
    top = 2**bits - 1
    middle = torch.full_like(low, (top + 1) / 2)
    best, least = None, torch.inf
    for shrink in (1, 0.9):
        if is_symmetric:
            scales = torch.maximum(-low, high * (top + 1) / (top - 1)) * shrink / middle
            candidates = [middle]
        else:
            low, high = low.clamp_max(0), high.clamp_min(0)
            scales = (high - low) * shrink / top
            exact = -low * shrink / scales.clamp_min(1e-6)
            candidates = [exact.floor().clamp(0, top), exact.ceil().clamp(0, top)]
        scales = scales.clamp_min(1e-6).to(dtype)
        for zeros in candidates:
            codes = (tiles / scales.float()).add_(zeros).round_().clamp_(0, top)
            error = ((codes - zeros) * scales.float()).sub_(tiles).square_().sum((1, 3), keepdim=True)
            found = codes, scales, zeros
            if best is not None:
                found = [torch.where(error < least, new, old) for new, old in zip(found, best, strict=True)]
            best, least = found, error.clamp_max(least)
    codes, scales, zeros = best
    codes = codes.view(len(weight), -1)[:, : weight.shape[1]].to(torch.int32)
    return codes, scales[:, 0, :, 0], zeros[:, 0, :, 0].to(torch.int32)


def pack_words(values: torch.Tensor, order: Sequence[int] = range(8), bits: int = 4) -> torch.Tensor:
    """[rows, n] -> int32 [rows, n * bits / 32]: the k-th of a word's values is its order[k]-th field."""
    words = values.reshape(len(values), -1, len(order)).long()
    return sum(words[:, :, k] << bits * field for k, field in enumerate(order)).to(torch.int32)


def unpack_words(words: torch.Tensor, order: Sequence[int] = range(8), bits: int = 4) -> torch.Tensor:
    return torch.stack([words >> bits * field & 2**bits - 1 for field in order], -1).flatten(-2)


def random_order(width: int) -> torch.Tensor:
    return torch.randperm(width, generator=torch.Generator().manual_seed(width))


def gptq(group: int = 32, dtype: torch.dtype = torch.float16, bits: int = 4, **config) -> Packer:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, **config}
    fields = range(32 // bits), bits
    order = (lambda width: random_order(width)) if config.get("desc_act") else torch.arange
    added = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def pack(weight: torch.Tensor) -> Tensors:
        width, size = weight.shape[1], group if group > 0 else weight.shape[1]
        groups = torch.empty(width, dtype=torch.int32)
        groups[order(width)] = torch.arange(width, dtype=torch.int32) // size
        codes, scales, zeros = to_integers(weight[:, order(width)], bits, size, config["sym"], dtype)
        codes = codes[:, order(width).argsort()]
        return {
            "qweight": pack_words(codes, *fields).t().contiguous(),
            "scales": scales.t().contiguous(),
            "qzeros": pack_words((zeros - added & 2**bits - 1).t().contiguous(), *fields),
            "g_idx": groups,
        }

    def unpack(packed: Tensors) -> torch.Tensor:
        codes, groups = unpack_words(packed["qweight"].t(), *fields), packed["g_idx"].long()
        zeros = (unpack_words(packed["qzeros"], *fields) + added & 2**bits - 1).t()
        return ((codes - zeros[:, groups]).to(dtype) * packed["scales"].t()[:, groups]).float()

    return Packer(config, pack, unpack, bits=bits)


def awq(group: int = 32, dtype: torch.dtype = torch.float16, **config) -> Packer:
    order = (0, 4, 1, 5, 2, 6, 3, 7)

    def pack(weight: torch.Tensor) -> Tensors:
        codes, scales, zeros = to_integers(weight, 4, group, False, dtype)
        packed = {"qweight": codes, "qzeros": zeros}
        packed = {name: pack_words(values.t().contiguous(), order) for name, values in packed.items()}
        return packed | {"scales": scales.t().contiguous()}

    def unpack(packed: Tensors) -> torch.Tensor:
        codes, zeros = (unpack_words(packed[name], order).t() for name in ("qweight", "qzeros"))
        codes -= zeros.repeat_interleave(group, 1)
        return (codes.to(dtype) * packed["scales"].t().repeat_interleave(group, 1)).float()

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        **config,
    }
    return Packer(config, pack, unpack, bits=4)


# --- compressed-tensors ---


def compressed(form: str, bits: int, strategy: str, dtype: torch.dtype = torch.bfloat16, **weights) -> Packer:
    kind = "float" if form == "float-quantized" else "int"
    weights = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        **weights,
    }
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    known = {
        name: value for name, value in weights.items() if name != "actorder"
    }  # it reads no other any more
    scheme = QuantizationScheme(targets=["Linear"], weights=known)
    compressor = BaseCompressor.get_value_from_registry(form)
    group = {"block": 128, "group": weights.get("group_size")}.get(strategy, 0)
    height = {"block": 128, "tensor": 0}.get(strategy, 1)
    has_order = weights.get("actorder") == "group"

    def pack(weight: torch.Tensor) -> Tensors:
        if kind == "float":
            codes, scales = to_fp8(weight, height, group, dtype)
            return {"weight": codes, "weight_scale": scales.view(1) if strategy == "tensor" else scales}
        order = random_order(weight.shape[1]) if has_order else torch.arange(weight.shape[1])
        codes, scales, zeros = to_integers(weight[:, order], bits, group, weights["symmetric"], dtype, height)
        if strategy == "tensor":
            scales, zeros = scales.view(1), zeros.view(1)
        middle = 2 ** (bits - 1)
        values = (codes[:, order.argsort()] - middle).to(torch.int8)
        packed = {"weight": values, "weight_scale": scales}
        if form == "pack-quantized":
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

            packed = {"weight_packed": pack_to_int32(values, bits), "weight_scale": scales}
            packed["weight_shape"] = torch.tensor(weight.shape)
            if not weights["symmetric"] and strategy == "tensor":
                packed["weight_zero_point"] = (zeros - middle).to(torch.int8)
            elif not weights["symmetric"]:
                packed["weight_zero_point"] = pack_to_int32(
                    (zeros - middle).to(torch.int8), bits, packed_dim=0
                )
        elif not weights["symmetric"]:
            packed["weight_zero_point"] = (zeros - middle).to(torch.int8)
        if has_order:
            packed["weight_g_idx"] = (order.argsort() // group).to(torch.int32)
        return packed

    def unpack(packed: Tensors) -> torch.Tensor:
        if has_order:  # which compressed-tensors leaves to whoever multiplies
            order = packed["weight_g_idx"].argsort(stable=True)
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

            shape = packed["weight_shape"].tolist()
            values = unpack_from_int32(packed["weight_packed"], bits, shape)[:, order]
            packed = packed | {"weight_packed": pack_to_int32(values, bits)}
            return compressor.decompress(packed, scheme)["weight"].float()[:, order.argsort()]
        return compressor.decompress(packed, scheme)["weight"].float()

    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    config["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
    }
    return Packer(config, pack, unpack, bits)


# --- 4-bit floating point ---


def fp4(form: str) -> Packer:
    """NVFP4 and MXFP4, both unpacked by compressed-tensors; of modelopt the same numbers by other names."""
    is_modelopt, group = form == "modelopt", 32 if "mxfp4" in form else 16
    form = "nvfp4-pack-quantized" if is_modelopt else form
    strategy = "group" if group == 32 else "tensor_group"
    weights = dict(num_bits=4, type="float", strategy=strategy, group_size=group)
    weights |= dict(symmetric=True, dynamic=False)
    known = weights | {"scale_dtype": "torch.uint8" if group == 32 else "torch.float8_e4m3fn"}
    scheme = QuantizationScheme(targets=["Linear"], weights=known)

    def pack(weight: torch.Tensor) -> Tensors:
        tiles = weight.float().unflatten(-1, (-1, group))
        largest = (tiles.abs().amax(-1) / 6).clamp_min(1e-6)
        packed = {}
        if group == 32:
            exponents = largest.log2().ceil()
            scales, meant = (exponents + 127).to(torch.uint8), exponents.exp2()
        else:
            factor = (448 * 6 / weight.abs().amax()).float().view(1)
            scales = (largest * factor).clamp_min(2**-6).to(E4M3)
            meant = scales.float() / factor
            packed = {"weight_global_scale": factor, "input_global_scale": torch.ones(1)}
        values = tiles[..., None] / meant[..., None, None]
        codes = (values - E2M1).abs().argmin(-1).to(torch.uint8).flatten(-2)
        packed |= {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
        if is_modelopt:
            factor = 1 / packed["weight_global_scale"].view(())
            packed = {"weight": packed["weight_packed"], "weight_scale": scales, "weight_scale_2": factor}
            packed["input_scale"] = torch.tensor(0.5)
        return packed

    def unpack(packed: Tensors) -> torch.Tensor:
        if is_modelopt:
            halves, scales, factor = (packed[name] for name in ("weight", "weight_scale", "weight_scale_2"))
            codes = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
            return E2M1[codes.int()] * (scales.float() * factor).repeat_interleave(16, 1)
        from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
        from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        halves, factor = packed["weight_packed"], packed.get("weight_global_scale")
        values = unpack_fp4_from_uint8(halves, halves.shape[0], 2 * halves.shape[1], F32)
        compressor = NVFP4PackedCompressor if group == 16 else MXFP4PackedCompressor
        scales = compressor._decompress_scale(packed["weight_scale"], F32)
        return dequantize(values, scales, args=scheme.weights, global_scale=factor, dtype=F32)

    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if is_modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    return Packer(config, pack, unpack, bits=4)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4() -> Packer:
    """Of the experts of one matrix, [experts, in, out] as gpt-oss has them in floating point."""

    def pack(weight: torch.Tensor) -> Tensors:
        groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = (groups.abs().amax(-1) / 6).clamp_min(2**-100).log2().ceil()
        values = groups / exponents.exp2()[..., None]
        codes = (values[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
        return {
            "blocks": codes[..., ::2] | codes[..., 1::2] << 4,
            "scales": (exponents + 127).to(torch.uint8),
        }

    def unpack(packed: Tensors) -> torch.Tensor:
        codes = torch.stack((packed["blocks"] & 15, packed["blocks"] >> 4), -1).flatten(-2)
        values = E2M1[codes.int()] * (packed["scales"].float() - 127).exp2()[..., None]
        return values.flatten(-2).transpose(1, 2)

    excepted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return Packer({"quant_method": "mxfp4", "modules_to_not_convert": excepted}, pack, unpack, bits=4)


# --- bitsandbytes ---


# Of `bitsandbytes.functional.get_4bit_type("nf4")`, by code.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 = torch.tensor([*NF4, 0.7229568362236023, 1.0])
STATE = "weight.quant_state.bitsandbytes__nf4"


def nf4(is_nested: bool) -> Packer:
    """Its table of 256 numbers is like bitsandbytes': closer together near 0."""
    table = torch.linspace(-1, 1, 256) ** 3

    def pack(weight: torch.Tensor) -> Tensors:
        tiles = weight.float().reshape(-1, 64)
        absmax = tiles.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
        packed = {"weight.quant_map": NF4.clone(), "weight.absmax": absmax}
        if is_nested:
            state |= {
                "nested_blocksize": 256,
                "nested_dtype": "float32",
                "nested_offset": absmax.mean().item(),
            }
            rest = F.pad(absmax - absmax.mean(), (0, -len(absmax) % 256)).view(-1, 256)
            largest = rest.abs().amax(1)
            places = ((rest / largest[:, None])[..., None] - table).abs().argmin(-1).to(torch.uint8)
            packed["weight.absmax"] = places.flatten()[: len(absmax)]
            packed |= {"weight.nested_absmax": largest, "weight.nested_quant_map": table.clone()}
        codes = (tiles[..., None] / absmax[:, None, None] - NF4).abs().argmin(-1).to(torch.uint8).view(-1, 2)
        packed["weight"] = codes[:, :1] << 4 | codes[:, 1:]
        return packed | {STATE: torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)}

    def unpack(packed: Tensors) -> torch.Tensor:
        state, absmax = json.loads(bytes(packed[STATE].tolist())), packed["weight.absmax"]
        if is_nested:
            places = packed["weight.nested_quant_map"][absmax.int()]
            absmax = packed["weight.nested_absmax"].repeat_interleave(256)[: len(places)] * places
            absmax += state["nested_offset"]
        codes = torch.cat((packed["weight"] >> 4, packed["weight"] & 15), dim=1)
        return (NF4[codes.int()].view(-1, 64) * absmax[:, None]).view(state["shape"])

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    config |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": is_nested}
    config |= {"bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None}
    return Packer(config, pack, unpack, bits=4)


def int8() -> Packer:
    def pack(weight: torch.Tensor) -> Tensors:
        largest = weight.float().abs().amax(1)
        codes = (weight.float() * 127 / largest[:, None]).round().to(torch.int8)
        return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}

    def unpack(packed: Tensors) -> torch.Tensor:
        return packed["weight"].float() * (packed["SCB"] / 127)[:, None]

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}
    return Packer(config, pack, unpack)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PACKERS = {
    "fp8 block": fp8([128, 128]),
    "fp8 block, bf16 scales": fp8([128, 128], BF16),
    "fp8 block, e8m0 scales": fp8([128, 128], torch.float8_e8m0fnu, scale_fmt="ue8m0"),
    "fp8 tensor": fp8(None, activation_scheme="static"),
    "AutoFP8": fp8(None, is_auto_fp8=True, activation_scheme="static", ignored_layers=["lm_head"]),
    "modelopt": modelopt("FP8", ignore=["lm_head"]),
    "modelopt, rows": modelopt("fp8_per_channel_per_token"),
    "modelopt nvfp4": fp4("modelopt"),
    "nvfp4": fp4("nvfp4-pack-quantized"),
    "mxfp4 of compressed-tensors": fp4("mxfp4-pack-quantized"),
    "float channel": compressed("float-quantized", 8, "channel"),
    "float tensor": compressed("float-quantized", 8, "tensor", F32),
    "float block": compressed("float-quantized", 8, "block", BF16),
    "int channel": compressed("int-quantized", 8, "channel"),
    "int group, asymmetric": compressed("int-quantized", 8, "group", group_size=64, symmetric=False),
    "pack 8": compressed("pack-quantized", 8, "group", group_size=64),
    "pack 8, asymmetric": compressed("pack-quantized", 8, "channel", symmetric=False),
    "pack 8, asymmetric tensor": compressed("pack-quantized", 8, "tensor", symmetric=False),
    "pack 4, asymmetric tensor": compressed("pack-quantized", 4, "tensor", symmetric=False),
    "pack 4": compressed("pack-quantized", 4, "group", group_size=32),
    "pack 4, asymmetric": compressed("pack-quantized", 4, "group", group_size=64, symmetric=False),
    "pack 4, channel": compressed("pack-quantized", 4, "channel", F16),
    "pack 4, ordered": compressed("pack-quantized", 4, "group", group_size=32, actorder="group"),
    "gptq": gptq(),
    "gptq, asymmetric": gptq(64, sym=False),
    "gptq v2": gptq(64, BF16, sym=False, checkpoint_format="gptq_v2"),
    "gptq, ordered": gptq(desc_act=True),
    "gptq, one group": gptq(-1),
    "gptq 8": gptq(bits=8),
    "gptq 8, asymmetric and ordered": gptq(64, bits=8, sym=False, desc_act=True),
    "auto-round": gptq(quant_method="auto-round", packing_format="auto_round:auto_gptq"),
    "awq": awq(),
    "awq, groups of 64": awq(64, BF16),
    "nf4": nf4(False),
    "nf4, nested": nf4(True),
    "int8 of bitsandbytes": int8(),
}


def quantise(
    source: Path, target: Path, packer: Packer, reference: Path | None = None, kept: tuple[str, ...] = ()
) -> Path:
    """
    Copy a checkpoint of one file with its layers packed, and, as `reference`, with what their packed form
    means. Layers whose names end with one of `kept` stay as they are.
    """
    tensors = load_file(source / "model.safetensors")
    packed, meant = {}, {}
    for name, value in tensors.items():
        layer = name.removesuffix(".weight")
        if name.endswith((".gate_up_proj", ".down_proj")):  # of all experts
            parts = packer.pack(value)
            packed |= {f"{name}_{end}": part for end, part in parts.items()}
            meant[name] = packer.unpack(parts)
            continue
        is_other = layer.rpartition(".")[2] not in QUANTISED or layer == name
        if is_other or layer.endswith(kept or (" ",)) or packer.config["quant_method"] == "mxfp4":
            packed[name] = meant[name] = value
            continue
        parts = packer.pack(value)
        packed |= {f"{layer}.{end}": part for end, part in parts.items()}
        meant[name] = packer.unpack(parts)
    config = json.loads((source / "config.json").read_text())
    for folder, content, changes in (
        (target, packed, {"quantization_config": packer.config}),
        (reference, meant, {}),
    ):
        if folder is not None:
            folder.mkdir(exist_ok=True)
            for file in source.iterdir():
                if file.suffix in (".json", ".jinja"):
                    (folder / file.name).write_text(file.read_text())
            (folder / "config.json").write_text(json.dumps(config | changes))
            content = {name: value.contiguous() for name, value in content.items()}
            save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    return target
