"""Damages tiny checkpoints in every way that somebody thought of, and sees what the engine makes of them.

`python tests/long/damaged_checkpoints.py --count 2000 --seed 0` tries so many and counts: each is refused by
a ValueError that names it, or loads with the weights that a second, independent reader finds in the file.
Case number i of a seed is always the same one. They run in a child process, so that a crash, a hang or a bomb
is one more result; `--only i` runs one case here and shows all of its error.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import paths  # noqa: F401
import torch
from gguf.quants import dequantize
from gguf_files import byte_level_metadata, write_gguf

from nanovllm import LLM, SamplingParams
from tiny_checkpoints import make_checkpoint

TINY = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=272,
    max_position_embeddings=128,
)
OPTIONS = dict(device="cpu", dtype="float32", kvcache_block_size=16, num_kvcache_blocks=4)
MAX_CPU_SECONDS = 2.0  # of one case
MAX_GROWTH = 512 << 20  # bytes of memory
HANGS_AFTER = 30.0  # seconds on the clock; whoever shares the machine may slow a case down
ADDRESS_SPACE = 16 << 30

DEEP = "[" * 100_000
HOSTILE_VALUES = [
    None, True, False, 0, 1, 2, 3, -1, 7.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), 2**24, 2**31,
    10**12, 2**63, 10**40, "", "x", "64", "../../etc/passwd", "/etc/passwd", "a\0b", "\ud800", "y" * 100_000,
    [], [[]], [0] * 1000, {}, {"a": {"b": []}}, ["Qwen3ForCausalLM"], "AutoTokenizer", [{"id": 2**40}],
    {"type": "nothing"}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": "2"},
    {"rope_type": "linear", "factor": 0}, {"rope_type": "frequency_factors", "factors": [1, 2, 3]},
]  # fmt: skip
Damage = Callable[[random.Random, Path], bool]


def make_sources(folder: Path) -> dict[str, Path]:
    """Valid checkpoints to be damaged: one file, several with an index, and GGUF, plain and quantised."""
    sources = {name: folder / name for name in ("one file", "sharded", "gguf", "gguf quantised")}
    make_checkpoint(sources["one file"], **TINY)
    make_checkpoint(sources["sharded"], shard_size="30KB", **TINY)
    tokenizer = {key.replace(".", "__"): value for key, value in byte_level_metadata("qwen2").items()}
    for name, quantisation in (("gguf", "F32"), ("gguf quantised", "Q8_0")):
        sources[name].mkdir()
        written = write_gguf(sources["one file"], quantisation, **tokenizer)
        shutil.move(written, sources[name] / "model.gguf")
    return sources


# Damage. Each function changes a folder and returns whether nobody may accept what is left.


def pick(rng: random.Random, folder: Path, *patterns: str) -> Path:
    return rng.choice(sorted(file for pattern in patterns for file in folder.glob(pattern)))


def weights(rng: random.Random, folder: Path) -> Path:
    return pick(rng, folder, "*.safetensors", "*.gguf")


def anything(rng: random.Random, folder: Path) -> Path:
    return pick(rng, folder, "*.*")


def place(rng: random.Random, raw: bytes) -> int:
    """A position in a file, as often in its first part, where the structure is, as in all of it."""
    return rng.randrange(max(1, len(raw) if rng.random() < 0.5 else min(len(raw), 4096)))


def truncate(rng: random.Random, folder: Path) -> bool:
    file = anything(rng, folder)
    raw = file.read_bytes()
    file.write_bytes(raw[: place(rng, raw)])
    return False


def flip_bits(rng: random.Random, folder: Path) -> bool:
    file = anything(rng, folder)
    raw = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        raw[place(rng, raw)] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)
    return False


def flip_bits_of_a_header(rng: random.Random, folder: Path) -> bool:
    file = weights(rng, folder)
    raw = bytearray(file.read_bytes())
    end = 8 + struct.unpack("<Q", raw[:8])[0] if file.suffix == ".safetensors" else 4000
    raw[rng.randrange(end)] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)
    return False


def overwrite(rng: random.Random, folder: Path) -> bool:
    file = anything(rng, folder)
    raw = bytearray(file.read_bytes())
    start, length = place(rng, raw), rng.choice([1, 4, 8, 100, 5000])
    raw[start : start + length] = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])
    file.write_bytes(raw)
    return False


def insert_or_remove(rng: random.Random, folder: Path) -> bool:
    file = anything(rng, folder)
    raw = file.read_bytes()
    start, length = place(rng, raw), rng.choice([1, 8, 64])
    removed = rng.random() < 0.5
    file.write_bytes(
        raw[:start] + (b"" if removed else rng.randbytes(length)) + raw[start + removed * length :]
    )
    return False


def append(rng: random.Random, folder: Path) -> bool:
    with open(anything(rng, folder), "ab") as file:
        file.write(rng.choice([b"\0", b" ", b"\n", rng.randbytes(100), b"{}"]))
    return False


def remove_a_file(rng: random.Random, folder: Path) -> bool:
    file = pick(rng, folder, "*.safetensors", "config.json", "*.gguf", "tokenizer*.json", "*.index.json")
    file.unlink()
    return file.suffix != ".json" or file.name == "config.json"


def exchange_files(rng: random.Random, folder: Path) -> bool:
    one, other = anything(rng, folder), anything(rng, folder)
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    return False


def replace_by_no_file(rng: random.Random, folder: Path) -> bool:
    """A folder, a pipe, a link to itself or into nothing."""
    file = pick(rng, folder, "*.safetensors", "config.json", "tokenizer.json", "*.gguf")
    file.unlink()
    [
        lambda: file.mkdir(),
        lambda: os.mkfifo(file),
        lambda: file.symlink_to(file.name),
        lambda: file.symlink_to("nothing"),
    ][rng.randrange(4)]()
    return True


def link_out(rng: random.Random, folder: Path) -> bool:
    """What is behind the link is valid: whoever follows it does not notice."""
    file = pick(rng, folder, "*.safetensors", "*.json")
    outside = folder.parent / "outside"
    outside.mkdir()
    shutil.move(file, outside / file.name)
    file.symlink_to(rng.choice([outside / file.name, Path("..", "outside", file.name)]))
    return True


def announce_another_header(rng: random.Random, folder: Path) -> bool:
    file = pick(rng, folder, "*.safetensors")
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    others = [
        0,
        1,
        length - 1,
        length + 1,
        length + 8,
        len(raw),
        len(raw) - 7,
        2**31,
        2**32,
        2**63,
        2**64 - 1,
    ]
    file.write_bytes(struct.pack("<Q", rng.choice(others)) + raw[8:])
    return True


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file and its data, without the safetensors package."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(file: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode(errors="surrogatepass")
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def some_tensor(rng: random.Random, header: dict[str, Any]) -> str:
    return rng.choice([name for name in header if name != "__metadata__"])


def overlap(rng: random.Random, folder: Path) -> bool:
    file = pick(rng, folder, "*.safetensors")
    header, data = read_header(file)
    entry = header[some_tensor(rng, header)]
    begin, end = entry["data_offsets"]
    shift = rng.choice([-4, -64, 4, 64]) if begin else 4
    entry["data_offsets"] = [begin + shift, end + shift]
    write_header(file, header, data)
    return True


def reshape(rng: random.Random, folder: Path) -> bool:
    file = pick(rng, folder, "*.safetensors")
    header, data = read_header(file)
    entry = header[some_tensor(rng, header)]
    shape = entry["shape"]
    shapes = [
        shape[::-1] if shape[0] != shape[-1] else [*shape, 1],
        [1, *shape],
        [],
        [0],
        [-1],
        [2**63, 2],
        [2**32, 2**32],
        [10**30],
        [shape[0] + 1, *shape[1:]],
        [int(np.prod(shape)) * 2, 0.5],
        "64",
        {"a": 1},
        None,
        [1] * 1000 + shape,
    ]
    entry["shape"] = rng.choice(shapes)
    write_header(file, header, data)
    return True


def retype(rng: random.Random, folder: Path) -> bool:
    """Another dtype, with data of its size, so that the file in itself is sound."""
    file = pick(rng, folder, "*.safetensors")
    header, data = read_header(file)
    name = some_tensor(rng, header)
    dtypes = {
        "I32": 4,
        "U8": 1,
        "BOOL": 1,
        "I64": 8,
        "F8_E4M3": 1,
        "F16": 2,
        "BF16": 2,
        "F64": 8,
        "F99": 4,
        "": 4,
    }
    dtype = rng.choice(list(dtypes))
    parts, offset = [], 0
    for other, entry in header.items():
        if other != "__metadata__":
            begin, end = entry["data_offsets"]
            part = bytes((end - begin) // 4 * dtypes[dtype]) if other == name else data[begin:end]
            entry["data_offsets"] = [offset, offset + len(part)]
            parts.append(part)
            offset += len(part)
    header[name]["dtype"] = dtype
    write_header(file, header, b"".join(parts))
    return dtype not in ("F16", "BF16", "F64")


def spoil_header(rng: random.Random, folder: Path) -> bool:
    """Some value of a header becomes another one, or a name does."""
    file = pick(rng, folder, "*.safetensors")
    header, data = read_header(file)
    name = some_tensor(rng, header)
    what = rng.choice(["dtype", "shape", "data_offsets", "entry", "name", "metadata", "extra", "twice"])
    if what in ("dtype", "shape", "data_offsets"):
        header[name][what] = rng.choice(HOSTILE_VALUES)
    elif what == "entry":
        header[name] = rng.choice(HOSTILE_VALUES)
    elif what == "name":
        header[rng.choice(["", "x", "../x", "a\0b", "y" * 100_000, name.upper()])] = header.pop(name)
    elif what == "metadata":
        header["__metadata__"] = rng.choice(HOSTILE_VALUES)
    elif what == "extra":
        header["stranger"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    else:
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
        write_header(file, text.encode(), data)
        return False
    write_header(file, header, data)
    indexed = (folder / "model.safetensors.index.json").exists()  # a tensor that it does not list is nobody's
    return what == "name" or (what == "extra" and not indexed)


def bloat_header(rng: random.Random, folder: Path) -> bool:
    file = pick(rng, folder, "*.safetensors")
    header, data = read_header(file)
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    bloated = [
        lambda: {**header, **{f"t{i}": nothing for i in range(50_000)}},
        lambda: DEEP.encode(),
        lambda: (b'{"a":' * 100_000) + b"1" + b"}" * 100_000,
        lambda: b" " * 10**7,
        lambda: {**header, "__metadata__": {"a": "x" * 10**7}},
        lambda: b"\xff" * 1000,
    ]
    write_header(file, rng.choice(bloated)(), data)
    return False


def poison(rng: random.Random, folder: Path) -> bool:
    """A weight that is no number."""
    file = pick(rng, folder, "*.safetensors")
    header, data = read_header(file)
    begin, end = header[some_tensor(rng, header)]["data_offsets"]
    raw, at = bytearray(data), rng.randrange(begin, end, 4)
    raw[at : at + 4] = struct.pack("<f", rng.choice([float("nan"), float("inf"), -float("inf")]))
    write_header(file, header, bytes(raw))
    return True


def lead_out(rng: random.Random, folder: Path) -> bool:
    """The index finds a tensor in a valid file that is not in the folder."""
    outside = folder.parent / "outside"
    outside.mkdir()
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    moved = rng.choice(sorted(set(content["weight_map"].values())))
    shutil.move(folder / moved, outside / moved)
    ways = [f"../outside/{moved}", str(outside / moved), f"x/../../outside/{moved}", f"link/{moved}"]
    way = rng.choice(ways)
    if way.startswith("link"):
        (folder / "link").symlink_to(outside)
    content["weight_map"] = {k: way if v == moved else v for k, v in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    return True


def spoil_index(rng: random.Random, folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names, files = list(content["weight_map"]), sorted(set(content["weight_map"].values()))
    what = rng.choice(["value", "all", "other file", "missing", "stranger", "huge"])
    if what == "value":
        content["weight_map"][rng.choice(names)] = rng.choice(HOSTILE_VALUES)
    elif what == "all":
        content["weight_map"] = rng.choice(HOSTILE_VALUES)
    elif what == "other file":
        name = rng.choice(names)
        content["weight_map"][name] = rng.choice([f for f in files if f != content["weight_map"][name]])
    elif what == "missing":
        del content["weight_map"][rng.choice(names)]
    elif what == "stranger":
        content["weight_map"]["stranger"] = rng.choice([*files, "stranger.safetensors", "config.json", "."])
    else:
        content["weight_map"] |= {f"t{i}": f"f{i}.safetensors" for i in range(50_000)}
    index.write_text(json.dumps(content))
    return True


def spoil_json(rng: random.Random, folder: Path) -> bool:
    """One value, anywhere in a JSON file, becomes another one."""
    file = pick(rng, folder, "*.json")
    content = json.loads(file.read_text())
    inside: Any = content
    while True:
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        key = rng.choice(keys)
        if not isinstance(inside[key], (dict, list)) or not inside[key] or rng.random() < 0.2:
            break
        inside = inside[key]
    inside[key] = rng.choice(HOSTILE_VALUES)
    file.write_text(json.dumps(content))
    return False


def spoil_config(rng: random.Random, folder: Path) -> bool:
    """One or two fields of the configuration, which everything else follows."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    extra = ["rope_theta", "rope_scaling", "quantization_config", "tokenizer_class", "auto_map", "mlp_bias"]
    for _ in range(rng.choice([1, 2])):
        content[rng.choice([*content, *extra])] = rng.choice(HOSTILE_VALUES)
    file.write_text(json.dumps(content))
    return False


def enlarge(rng: random.Random, folder: Path) -> bool:
    """A configuration whose model would fill any memory."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    sizes = ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"]
    for name in rng.sample(sizes, rng.choice([2, 3, 5])):
        content[name] = 2 ** (10 if name == "num_hidden_layers" else 24)
    file.write_text(json.dumps(content))
    return True


def bloat_json(rng: random.Random, folder: Path) -> bool:
    file = pick(rng, folder, "*.json")
    text = file.read_text().rstrip()[:-1]
    bloated = [
        lambda: DEEP,
        lambda: '{"a":' * 100_000,
        lambda: text + f', "a": {DEEP}{"]" * len(DEEP)}}}',
        lambda: text + f', "a": [{"[]," * 10**6}[]]}}',
        lambda: text + f', "a": {"9" * 10**6}}}',
        lambda: text + ', "a": "' + "x" * 2**25 + '"}',
        lambda: text + ", " + ", ".join(f'"k{i}": {i}' for i in range(10**5)) + "}",
        lambda: "\ufeff" + text + "}",
    ]
    file.write_text(rng.choice(bloated)())
    return False


def name_code(rng: random.Random, folder: Path) -> bool:
    """Code of the checkpoint's own, which the harness finds out about if somebody runs it."""
    (folder / "evil.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\nclass Evil: pass\n")
    code = dict.fromkeys(["AutoConfig", "AutoModel", "AutoModelForCausalLM"], "evil.Evil")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {
            "auto_map": {**code, "AutoTokenizer": ["evil.Evil", "evil.Evil"]},
            "trust_remote_code": True,
        }
        classes = [None, "Evil", "EvilTokenizer", "AutoTokenizer", "AutoModelForCausalLM", "LlamaTokenizer"]
        content["tokenizer_class"] = rng.choice(classes)
        content["model_type"] = rng.choice(["evil", "qwen3", "rag"])
        (folder / name).write_text(json.dumps(content))
    return False


def write_absurd_number(rng: random.Random, folder: Path) -> bool:
    """A count, a length, a type or a size in a GGUF header."""
    file = folder / "model.gguf"
    raw = bytearray(file.read_bytes())
    code = rng.choice("IQ")
    values = [0, 1, 2, 2**15, 2**21 + 1, 2**31, 2**32 - 1] + (
        [2**40, 2**63, 2**64 - 1] if code == "Q" else []
    )
    start = rng.choice([4, 8, 16, *(place(rng, raw) for _ in range(6))])
    raw[start : start + struct.calcsize(code)] = struct.pack("<" + code, rng.choice(values))
    file.write_bytes(raw)
    return False


def spoil_metadata(rng: random.Random, folder: Path) -> bool:
    """The value, the type or the length of one key of a GGUF file."""
    file = folder / "model.gguf"
    raw = bytearray(file.read_bytes())
    reader = gguf.GGUFReader(file)
    key = rng.choice([name for name in reader.fields if not name.startswith("GGUF.")])
    start = raw.index(key.encode()) + len(key)
    kinds = [struct.pack("<I", kind) for kind in (*range(13), 99)]
    numbers = [
        struct.pack("<" + c, v) for c, v in (("I", 0), ("I", 2**31), ("f", float("nan")), ("Q", 2**63))
    ]
    new = rng.choice([*kinds, *numbers])
    at = start if new in kinds else start + rng.choice([4, 8, 16, 20])
    raw[at : at + len(new)] = new
    file.write_bytes(raw)
    return False


def spoil_tensor_entry(rng: random.Random, folder: Path) -> bool:
    """The shape, the quantisation or the place of one tensor of a GGUF file."""
    file = folder / "model.gguf"
    raw = bytearray(file.read_bytes())
    tensor = rng.choice(gguf.GGUFReader(file).tensors)
    start = raw.index(struct.pack("<Q", len(tensor.name)) + tensor.name.encode()) + 8 + len(tensor.name)
    dimensions = len(tensor.shape)
    fields = {0: "I", 4: "Q", 4 + 8 * dimensions: "I", 8 + 8 * dimensions: "Q"}
    at = rng.choice(list(fields))
    old = struct.unpack_from("<" + fields[at], raw, start + at)[0]
    limit = 2 ** (8 * struct.calcsize(fields[at]))
    values = [v for v in (0, 1, 2, 8, 31, 64, 2**31, 2**63, old + 1, old + 32, old - 32) if 0 <= v < limit]
    struct.pack_into("<" + fields[at], raw, start + at, rng.choice(values))
    file.write_bytes(raw)
    return False


def poison_gguf(rng: random.Random, folder: Path) -> bool:
    """A weight, or the scale of a block of them, that is no number."""
    file = folder / "model.gguf"
    raw = bytearray(file.read_bytes())
    tensor = rng.choice(gguf.GGUFReader(file).tensors)
    code, size = ("e", 34) if tensor.tensor_type.name == "Q8_0" else ("f", 4)
    at = int(tensor.data_offset) + rng.randrange(tensor.n_bytes // size) * size
    struct.pack_into("<" + code, raw, at, rng.choice([float("nan"), float("inf")]))
    file.write_bytes(raw)
    return True


ANY_KIND = [truncate, flip_bits, flip_bits_of_a_header, overwrite, insert_or_remove, append, remove_a_file]
SAFETENSORS = [announce_another_header, overlap, reshape, retype, spoil_header, bloat_header, poison]
FOLDER = [exchange_files, link_out, spoil_json, spoil_config, enlarge, bloat_json, name_code]
GGUF = [write_absurd_number, spoil_metadata, spoil_tensor_entry, poison_gguf]
KINDS: list[tuple[str, Damage]] = [
    *(("one file", damage) for damage in [*ANY_KIND, replace_by_no_file, *SAFETENSORS, *FOLDER]),
    *(
        ("sharded", d)
        for d in [*ANY_KIND, replace_by_no_file, *SAFETENSORS, lead_out, spoil_index, spoil_index]
    ),
    *(("gguf", damage) for damage in [*ANY_KIND, replace_by_no_file, *GGUF]),
    *(("gguf quantised", damage) for damage in [*ANY_KIND, *GGUF]),
]


# The second reader, which shares nothing with the engine's


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())["weight_map"]
    else:
        listed = {name: file.name for file in folder.glob("*.safetensors") for name in read_header(file)[0]}
        listed.pop("__metadata__", None)
    headers = {file: read_header(folder / file) for file in set(listed.values())}
    return {name: _decode(headers[file][0][name], headers[file][1]) for name, file in listed.items()}


def _decode(entry: dict[str, Any], data: bytes) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    if entry["dtype"] == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data[begin:end], "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data[begin:end], {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[entry["dtype"]])
    return torch.from_numpy(values.astype("<f4").reshape(entry["shape"]))


MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(file: Path) -> dict[str, torch.Tensor]:
    """By the reader of the gguf package, under Hugging Face's names."""
    tensors = {}
    for tensor in gguf.GGUFReader(file).tensors:
        module, kind = tensor.name.rsplit(".", 1)
        name = MODULES.get(module)
        if name is None:
            _, layer, part = module.split(".")
            name = f"model.layers.{layer}.{LAYER_MODULES[part]}"
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        tensors[f"{name}.{kind}"] = torch.from_numpy(np.array(values))
    return tensors


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the engine's model holds them: projections with the same input are one matrix."""
    packs = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    result = dict(tensors)
    for name in tensors:
        for whole, parts in packs.items():
            if parts[0] in name:
                values = [result.pop(name.replace(parts[0], part)) for part in parts]
                result[name.replace(parts[0], whole)] = torch.cat(values)
    return result


def differences(llm: LLM, path: Path) -> str:
    """How the loaded model differs from what the file says, or nothing."""
    expected = packed(read_safetensors(path) if path.is_dir() else read_gguf(path))
    config = llm.config.hf_config
    params = llm.model_runner.model.named_parameters()
    loaded = {name: param.to_dense() if param.is_mkldnn else param for name, param in params}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    if loaded.keys() != expected.keys():
        return f"names {sorted(loaded.keys() ^ expected.keys())}"
    for name, value in expected.items():
        if not torch.equal(loaded[name], value):
            return f"values of {name}"
    if path.is_dir():
        said = json.loads((path / "config.json").read_bytes())
        for field, default in (("rms_norm_eps", 1e-6), ("tie_word_embeddings", False)):
            if getattr(config, field) != (default if said.get(field) is None else said[field]):
                return field
    return ""


# Trying


class Result(NamedTuple):
    index: int
    source: str
    damage: str
    outcome: str  # "refused", "loaded" or "FAILED"
    message: str
    seconds: float = 0.0
    growth: int = 0


def describe(index: int) -> tuple[str, Damage]:
    return KINDS[index % len(KINDS)]


def damage_copy(sources: dict[str, Path], seed: int, index: int, folder: Path) -> tuple[Path, bool]:
    """Write case `index` into `folder`. Returns what the engine shall open, and whether it must refuse it."""
    source, damage = describe(index)
    copy = folder / "checkpoint"
    shutil.copytree(sources[source], copy)
    must_be_refused = damage(random.Random(f"{seed}:{index}"), copy)
    return (copy / "model.gguf" if source.startswith("gguf") else copy), must_be_refused


def judge(path: Path, must_be_refused: bool) -> tuple[str, str]:
    """Load a checkpoint and let it make a token: outcome and message of a `Result`."""
    try:
        with LLM(str(path), **OPTIONS) as llm:
            found = differences(llm, path)
            completion = llm.generate([[1, 2, 3]], SamplingParams(0, 2, True), use_tqdm=False)[0]["token_ids"]
    except BaseException as error:
        name = str(path if path.is_dir() else path.parent)
        # Not a subclass: those of ValueError are raised by libraries that do not know which file it was.
        clear = type(error) is ValueError and (name in str(error) or "the checkpoint's" in str(error))
        outcome, message = "refused" if clear else "FAILED", f"{type(error).__name__}: {error}"
    else:
        outcome, message = "loaded", "with the weights of the file"
        if found or must_be_refused or len(completion) != 2:
            outcome, message = (
                "FAILED",
                f"loaded, but differs in {found}" if found else "loaded what nobody may",
            )
    if (path.parent / "executed").exists() or (path / "executed").exists():
        outcome, message = "FAILED", "ran code of the checkpoint"
    return outcome, message


def peak_memory() -> int:
    """Most bytes held since `forget_peak`, or ever where the kernel does not forget."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def try_one(sources: dict[str, Path], seed: int, index: int) -> Result:
    source, damage = describe(index)
    with tempfile.TemporaryDirectory() as folder:
        path, must_be_refused = damage_copy(sources, seed, index, Path(folder).resolve())
        forget_peak()
        before, start = peak_memory(), time.process_time()
        outcome, message = judge(path, must_be_refused)
        seconds, growth = time.process_time() - start, peak_memory() - before
    if seconds > MAX_CPU_SECONDS or growth > MAX_GROWTH:
        outcome, message = "FAILED", f"took {seconds:.1f} s and {growth >> 20} MB; {message}"
    return Result(index, source, damage.__name__, outcome, message, seconds, growth)


def _work(connection: Any, sources: dict[str, Path], seed: int) -> None:
    """The child process: takes the numbers of cases, gives back their results."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, folder in sources.items():  # what is imported and set up once shall not count
        outcome, message = judge(folder / "model.gguf" if name.startswith("gguf") else folder, False)
        assert outcome == "loaded", message
    connection.send("ready")
    while (index := connection.recv()) is not None:
        connection.send(try_one(sources, seed, index))


def try_all(sources: dict[str, Path], seed: int, indices: range) -> Iterator[Result]:
    """The results of these cases. Whatever ends the child process is the result of the case it was at."""
    context = multiprocessing.get_context("spawn")
    child = connection = None
    for index in indices:
        if child is None:
            connection, theirs = context.Pipe()
            child = context.Process(target=_work, args=(theirs, sources, seed), daemon=True)
            child.start()
            theirs.close()
            if not connection.poll(300) or connection.recv() != "ready":
                raise RuntimeError("the child process does not start")
        connection.send(index)
        try:
            if connection.poll(HANGS_AFTER):
                yield connection.recv()
                continue
            message = f"hangs for more than {HANGS_AFTER:.0f} s"
        except EOFError:
            child.join()
            message = f"the process ended with exit code {child.exitcode}"
        child.kill()
        child.join()
        child = None
        source, damage = describe(index)
        yield Result(index, source, damage.__name__, "FAILED", message)
    if child is not None:
        connection.send(None)
        child.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, in this process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(Path(folder))
        if args.only is not None:
            path, must_be_refused = damage_copy(sources, args.seed, args.only, Path(folder))
            print(*describe(args.only), "must be refused" if must_be_refused else "", judge(path, False))
            LLM(str(path), **OPTIONS).exit()
            return
        results = []
        for result in try_all(sources, args.seed, range(args.count)):
            results.append(result)
            if result.outcome == "FAILED":
                print(
                    f"case {result.index}, {result.source}, {result.damage}: {result.message:.300}",
                    flush=True,
                )
    counts = Counter((r.source, r.damage, r.outcome) for r in results)
    print(f"{'checkpoint':15} {'damage':24} {'tried':>6} {'refused':>8} {'loaded':>7} {'FAILED':>7}")
    for source, damage in dict.fromkeys((source, damage.__name__) for source, damage in KINDS):
        row = [counts[source, damage, outcome] for outcome in ("refused", "loaded", "FAILED")]
        print(f"{source:15} {damage:24} {sum(row):6} {row[0]:8} {row[1]:7} {row[2]:7}")
    row = [sum(r.outcome == outcome for r in results) for outcome in ("refused", "loaded", "FAILED")]
    print(f"{'all':40} {len(results):6} {row[0]:8} {row[1]:7} {row[2]:7}")
    print(f"longest: {max(r.seconds for r in results):.2f} s of CPU time")
    print(f"largest growth of memory: {max(r.growth for r in results) >> 20} MB")


if __name__ == "__main__":
    main()
