"""Runs the few instructions of PTX with which kernels read codes and multiply them, where there is no GPU."""

import re
from collections.abc import Sequence

import torch

DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run(asm: str, outputs: int, inputs: Sequence[int]) -> list[int]:
    """
    What stands in the operands $0, $1, ... of so many outputs, words of 32 bits, after these instructions;
    inputs are the operands behind them.
    """
    registers = {f"${outputs + i}": word for i, word in enumerate(inputs)}
    for line in re.split(r"[;{}]", asm):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *operands = (each.strip() for each in rest.split(","))
        words = [registers[each] if each in registers else int(each, 0) for each in operands]
        registers[target] = execute(name, words) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(outputs)]


def execute(name: str, words: list[int]) -> int:
    kind, *_, suffix = name.split(".")
    if kind == "fma":
        x, factor, added = (pair(word, DTYPES[suffix]) for word in words)
        return word_of((x.double() * factor.double() + added.double()).to(x.dtype))
    if kind == "dp4a":
        factors = (bytes_of(word, dtype) for word, dtype in zip(words, name.split(".")[1:], strict=False))
        return words[2] + sum(a * b for a, b in zip(*factors, strict=True))
    first, *others = words
    match kind:
        case "mov":
            return first
        case "and":
            return first & others[0]
        case "or":
            return first | others[0]
        case "xor":
            return first ^ others[0]
        case "shl":
            return first << others[0]
        case "shr":
            return (first - (first >> 31 << 32) if suffix == "s32" else first) >> others[0]
        case "add":
            return first + others[0]
        case "prmt":
            return permuted_bytes(first | others[0] << 32, others[1])
    raise NotImplementedError(name)


def bytes_of(word: int, dtype: str) -> list[int]:
    """From the lowest on; s32 says that they are signed."""
    found = word.to_bytes(4, "little")
    return [byte - 256 * (byte >> 7) for byte in found] if dtype == "s32" else [*found]


def permuted_bytes(data: int, selector: int) -> int:
    """Four bytes of eight; at a place of 8 or more, the first bit of the byte 8 places before, repeated."""
    found = 0
    for i in range(4):
        place = selector >> 4 * i & 15
        byte = data >> 8 * (place & 7) & 255
        found |= (255 * (byte >> 7) if place & 8 else byte) << 8 * i
    return found


def pair(word: int, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers in a word, the one in its low half first."""
    return torch.tensor([word], dtype=torch.int64).to(torch.int32).view(dtype)


def word_of(numbers: torch.Tensor) -> int:
    return int(numbers.view(torch.int32)) & 0xFFFFFFFF
