"""Runs PTX, the assembly language that Triton compiles kernels to, where there is no GPU.

All threads of a program take an instruction together, so a register is an array with a number for each
thread, and shared memory never has to be waited for. Only what our kernels use is known: anything else, also
a branch that some threads take and some do not, raises an error.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

Numbers = np.ndarray  # [threads], or [threads, 2] for pairs: int64 or float64
Raw = np.ndarray  # uint64 [threads]: bits
BITS = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "b32": 32, "u32": 32, "s32": 32}
BITS |= {"b64": 64, "u64": 64, "s64": 64, "pred": 1}
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes
FIRST_ADDRESS = 4096  # of tensors
WAITS = {"bar", "griddepcontrol"}


def decode(raw: Raw, kind: str) -> Numbers:
    """The numbers that bits stand for."""
    if kind.endswith("x2"):
        dtype = kind[:-2]
        size = 8 * FLOATS[dtype].itemsize
        halves = [decode(raw >> np.uint64(shift), dtype) for shift in (0, size)]
        return np.stack(halves, 1)
    if kind in FLOATS:
        dtype = FLOATS[kind]
        bits = torch.from_numpy(decode(raw, f"u{8 * dtype.itemsize}")).to(INTS[dtype.itemsize])
        return bits.view(dtype).double().numpy()
    size = BITS[kind]
    if size == 64:
        return raw.astype(np.int64)
    numbers = (raw & np.uint64((1 << size) - 1)).astype(np.int64)
    return numbers - (numbers >> size - 1 << size) if kind[0] == "s" else numbers


def encode(numbers: Numbers, kind: str) -> Raw:
    if kind.endswith("x2"):
        size = 8 * FLOATS[kind[:-2]].itemsize
        low, high = (encode(half, kind[:-2]) for half in numbers.T)
        return low | high << np.uint64(size)
    if kind in FLOATS:
        dtype = FLOATS[kind]
        bits = (
            torch.from_numpy(np.ascontiguousarray(numbers, np.float64)).to(dtype).view(INTS[dtype.itemsize])
        )
        return encode(bits.long().numpy(), f"u{8 * dtype.itemsize}")
    return numbers.astype(np.int64).astype(np.uint64) & np.uint64((1 << BITS[kind]) - 1)


def _permuted_bytes(a: Numbers, b: Numbers, selector: Numbers) -> Numbers:
    """Four bytes of eight; at a place of 8 or more, the first bit of the byte 8 places before, repeated."""
    found = np.zeros_like(a)
    for i in range(4):
        place = selector >> 4 * i & 15
        source = np.where(place & 4, b, a)
        byte = source >> 8 * (place & 3) & 255
        found |= np.where(place & 8, 255 * (byte >> 7), byte) << 8 * i
    return found


# From numbers to numbers, of the last type that the instruction names.
OPERATIONS: dict[str, Callable[..., Numbers]] = {
    "mov": lambda a: a,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b if a.dtype == np.float64 else a // b,
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.fmin,
    "max": np.fmax,
    "max.NaN": np.maximum,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "prmt": _permuted_bytes,
    "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
}
COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
COMPARISONS |= {"eq": np.equal, "ne": np.not_equal}


class Code:
    """Instructions as (predicate, name, operands), and at which of them labels stand."""

    def __init__(self, text: str):
        self.instructions: list[tuple[str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        for piece in re.split(r"[;\n]", re.sub(r"//.*", "", text)):
            # A block may begin or end on the same line; a list in brackets stays.
            rest = piece.replace("::cta", "").strip().lstrip("{} ")
            if rest.count("}") > rest.count("{"):
                rest = rest[: rest.rindex("}")]
            if label := re.match(r"(\$\w+):$", rest):
                self.labels[label[1]] = len(self.instructions)
            elif found := re.match(r"(?:@(!?%?\w+)\s+)?([a-z]\w*(?:\.\w+)*)\s*(.*)", rest):
                operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", found[3])
                self.instructions.append((found[1] or "", found[2], operands))


class Program:
    """One program of a kernel, its threads and its memory."""

    def __init__(self, count: int, registers: dict[str, Raw], memory: Numbers, shared_bytes: int = 0):
        self.count = count
        self.registers = dict(registers)
        self.memory = memory
        self.shared = np.zeros(shared_bytes, np.uint8)

    def run(self, code: Code) -> None:
        at = 0
        while at < len(code.instructions):
            predicate, name, operands = code.instructions[at]
            at += 1
            active = np.ones(self.count, bool)
            if predicate:
                active = self.read(predicate.lstrip("!"), "pred").astype(bool) ^ (predicate[0] == "!")
            if name.partition(".")[0] in ("bra", "ret"):
                if active.any() != active.all():
                    raise NotImplementedError("threads take different branches")
                if active.all():
                    if name == "ret":
                        return
                    at = code.labels[operands[0]]
            elif active.any():
                self.execute(name, operands, active)

    def read(self, operand: str, kind: str) -> Numbers:
        if operand in self.registers:
            return decode(self.registers[operand], kind)
        if operand.startswith("{"):
            parts = operand.strip("{}").split(",")
            size = BITS[kind] // len(parts)
            pieces = [encode(self.read(each.strip(), f"u{size}"), f"u{size}") for each in parts]
            return decode(sum(raw << np.uint64(size * i) for i, raw in enumerate(pieces)), kind)
        if operand.startswith("0f"):
            return decode(np.full(self.count, int(operand[2:], 16), np.uint64), kind)
        if operand == "global_smem":
            return np.zeros(self.count, np.int64)
        number = int(operand.rstrip("U"), 0)
        return decode(np.full(self.count, number & (1 << 64) - 1, np.uint64), kind)

    def write(self, target: str, numbers: Numbers, kind: str, active: Numbers) -> None:
        if target.startswith("{"):
            parts = target.strip("{}").split(",")
            size = BITS[kind] // len(parts)
            raw = encode(numbers, kind)
            for i, part in enumerate(parts):
                if part.strip() != "_":
                    piece = decode(raw >> np.uint64(size * i), f"u{size}")
                    self.write(part.strip(), piece, f"u{size}", active)
            return
        raw = encode(numbers, kind)
        self.registers[target] = np.where(active, raw, self.registers.get(target, raw))

    def execute(self, name: str, operands: list[str], active: Numbers) -> None:
        operation, *words = name.split(".")
        kind = words[-1] if words else ""
        if special := getattr(self, f"_{operation}", None):
            special(words, operands, active)
        elif operation not in WAITS:
            target, *sources = operands
            values = [self.read(each, kind) for each in sources]
            if operation in ("shl", "shr"):
                values[1] = np.minimum(self.read(sources[1], "u32"), 63)
            if "NaN" in words:
                operation = f"{operation}.NaN"
            result = OPERATIONS[operation](*values)
            if "wide" in words:
                kind = f"{kind[0]}{2 * BITS[kind]}"
            elif "hi" in words:
                result >>= BITS[kind]
            self.write(target, result, kind, active)

    def _mad(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, *factors, added = operands
        wide = f"{words[-1][0]}64" if "wide" in words else words[-1]
        product = np.multiply(*(self.read(each, words[-1]) for each in factors))
        self.write(target, product + self.read(added, wide), wide, active)

    def _bfe(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, *sources = operands
        field, begin, size = (self.read(each, "u32") for each in sources)
        field = field >> begin & (1 << size) - 1
        if words[-1] == "s32":
            field -= field >> size - 1 << size
        self.write(target, field, "s32", active)

    def _cvt(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, *sources = operands
        to, source_kind = (word for word in words if word.removesuffix("x2") in FLOATS or word in BITS)
        values = [self.read(each, source_kind) for each in sources]
        numbers = np.stack(values[::-1], 1) if len(values) == 2 else values[0]  # the high half comes first
        if numbers.dtype == np.float64 and to in BITS:
            numbers = np.trunc(numbers) if "rzi" in words else np.rint(numbers)
        self.write(target, numbers, to, active)

    def _setp(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, *compared = operands
        numbers = COMPARISONS[words[0]](*(self.read(each, words[-1]) for each in compared))
        self.write(target, numbers, "pred", active)

    def _selp(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, first, second, predicate = operands
        values = self.read(first, words[-1]), self.read(second, words[-1])
        self.write(target, np.where(self.read(predicate, "pred"), *values), words[-1], active)

    def _dp4a(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, *factors, total = operands
        result = self.read(total, "s32")
        for shift in range(0, 32, 8):
            first, second = (
                decode(encode(self.read(each, "u32") >> shift, "u32"), f"{kind[0]}8")
                for each, kind in zip(factors, words, strict=True)
            )
            result = result + first * second
        self.write(target, result, "s32", active)

    def _shfl(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, source, lane, *_ = operands
        thread, lanes = np.arange(self.count), self.read(lane, "u32")
        source_thread = {"bfly": thread ^ lanes, "idx": thread // 32 * 32 + lanes % 32}[words[1]]
        self.write(target, self.read(source, "b32")[source_thread], "b32", active)

    def _ld(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, place = operands
        if "param" in words:
            return self.write(target, self.read(place.strip("[]"), words[-1]), words[-1], active)
        for part, address in self._pieces(target, place, words, active):
            size = BITS[words[-1]] // 8
            memory = self.shared if "shared" in words else self.memory
            raw = sum(memory[address + i].astype(np.uint64) << np.uint64(8 * i) for i in range(size))
            self.write(part, decode(raw, words[-1]), words[-1], active)

    def _st(self, words: list[str], operands: list[str], active: Numbers) -> None:
        place, source = operands
        for part, address in self._pieces(source, place, words, active):
            memory, raw = self.shared if "shared" in words else self.memory, self.read(part, words[-1])
            for i in range(BITS[words[-1]] // 8):
                memory[address[active] + i] = (raw >> 8 * i & 255)[active]

    def _pieces(
        self, registers: str, place: str, words: list[str], active: Numbers
    ) -> Iterator[tuple[str, Numbers]]:
        """Registers, and the address of each."""
        parts = [part.strip() for part in registers.strip("{}").split(",")]
        size, address = BITS[words[-1]] // 8, self._address(place)
        if "shared" not in words:
            first, end = address[active].min(), address[active].max() + size * len(parts)
            if (
                first < FIRST_ADDRESS
                or end > len(self.memory)
                or (address[active] % (size * len(parts))).any()
            ):
                raise IndexError(f"addresses from {first} to {end}")
        for i, part in enumerate(parts):
            yield part, np.where(active, address + size * i, 0)

    def _address(self, place: str) -> Numbers:
        base, _, offset = place.strip("[] ").partition("+")
        return self.read(base.strip(), "s64") + int(offset or "0", 0)

    def _atom(self, words: list[str], operands: list[str], active: Numbers) -> None:
        target, place, added = operands
        address, numbers = self._address(place), self.read(added, "u32")
        if words[-2:] != ["add", "u32"] or active.sum() != 1:
            raise NotImplementedError(".".join(words))
        [at], [number] = address[active], numbers[active]
        before = self.memory[at : at + 4].view(np.uint32)[0]
        self.memory[at : at + 4] = np.array([before + number], np.uint32).view(np.uint8)
        self.write(target, np.full(self.count, before), "u32", active)

    def _cp(self, words: list[str], operands: list[str], active: Numbers) -> None:
        """Copied at once, so there is nothing to wait for, and nothing to prefetch."""
        if words[1] in ("commit_group", "wait_group", "bulk"):
            return
        target, place, size, *real = operands
        count = (
            self.read(real[0], "u32") if real else np.full(self.count, int(size, 0))
        )  # behind them are zeros
        targets, places = self._address(target), self._address(place)
        for i in range(int(size, 0)):
            is_there = active & (i < count)
            self.shared[targets[active] + i] = 0
            self.shared[targets[is_there] + i] = self.memory[places[is_there] + i]

    def _mma(self, words: list[str], operands: list[str], active: Numbers) -> None:
        """A warp's product of matrices [16, 16] and [16, 8]; a register has two neighbours along inputs."""
        if words[2] != "m16n8k16" or words[-2] not in ("f16", "bf16"):
            raise NotImplementedError(".".join(words))
        target, *sources = ([each.strip() for each in operand.strip("{}").split(",")] for operand in operands)
        # A thread's registers: of rows or columns `group`, and the same 8 behind, those `pair` and 8 behind.
        group, pair, warps = np.arange(32) // 4, np.arange(32) % 4 * 2, self.count // 32
        first, second, total = (np.zeros((warps, *shape)) for shape in ((16, 16), (16, 8), (16, 8)))
        for half in range(2):
            for i, register in enumerate(sources[0]):
                numbers = self.read(register, f"{words[-2]}x2").reshape(warps, 32, 2)
                first[:, group + i % 2 * 8, pair + i // 2 * 8 + half] = numbers[..., half]
            for i, register in enumerate(sources[1]):
                numbers = self.read(register, f"{words[-2]}x2").reshape(warps, 32, 2)
                second[:, pair + i * 8 + half, group] = numbers[..., half]
        for i, register in enumerate(sources[2]):
            total[:, group + i // 2 * 8, pair + i % 2] = self.read(register, "f32").reshape(warps, 32)
        total += first @ second
        for i, register in enumerate(target):
            self.write(register, total[:, group + i // 2 * 8, pair + i % 2].flatten(), "f32", active)

    def _stmatrix(self, words: list[str], operands: list[str], active: Numbers) -> None:
        place, registers = operands
        for register, halves in self._matrices(registers, place, words):
            raw = self.read(register, "u32")
            for half, address in enumerate(halves):
                for i in range(2):
                    self.shared[address + i] = raw >> 16 * half + 8 * i & 255

    def _ldmatrix(self, words: list[str], operands: list[str], active: Numbers) -> None:
        registers, place = operands
        for register, halves in self._matrices(registers, place, words):
            found = [self.shared[address + i].astype(np.int64) for address in halves for i in range(2)]
            self.write(register, sum(byte << 8 * i for i, byte in enumerate(found)), "u32", active)

    def _matrices(self, registers: str, place: str, words: list[str]) -> Iterator[tuple[str, list[Numbers]]]:
        """
        Of matrices of 8 x 8 numbers of 16 bits, one a register, the addresses of the two numbers that each
        thread holds. Of all matrices together a thread also has the address of one row.
        """
        rows, lane = self._address(place).reshape(-1, 32), np.arange(32)
        for matrix, register in enumerate(registers.strip("{}").split(",")):
            halves = []
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if "trans" in words:
                    row, column = column, row
                halves.append((rows[:, 8 * matrix + row] + 2 * column).flatten())
            yield register.strip(), halves


def run(asm: str, outputs: int, inputs: Sequence[int]) -> list[int]:
    """
    What stands in the operands $0, $1, ... of so many outputs, words of 32 bits, after these instructions;
    inputs are the operands behind them.
    """
    registers = {f"${outputs + i}": np.array([word], np.uint64) for i, word in enumerate(inputs)}
    program = Program(1, registers, np.zeros(0, np.uint8))
    program.run(Code(asm))
    return [int(program.registers[f"${i}"][0]) for i in range(outputs)]


def launch(kernel: Any, compiled: Any, arguments: dict[str, Any], grid: Sequence[int]) -> None:
    """Run a kernel that Triton has compiled; `arguments` by name, whose tensors, on the CPU, are changed."""
    kinds = compiled.src.signature
    flat = [each for name in kernel.arg_names for each in _flattened(arguments[name], kinds[name])]
    memory, places = np.zeros(FIRST_ADDRESS, np.uint8), []
    for i, each in enumerate(flat):
        if isinstance(each, torch.Tensor):
            sizes = zip(each.shape, each.stride(), strict=True)
            whole = torch.as_strided(each, (1 + sum((n - 1) * stride for n, stride in sizes),), (1,))
            places.append((len(memory), whole))
            flat[i] = len(memory)
            data = whole.view(torch.uint8).numpy()
            memory = np.concatenate([memory, data, np.zeros(-len(data) % 256 + 256, np.uint8)])
    text = compiled.asm["ptx"]
    names = re.findall(r"\w+_param_\d+", text[: text.index(")", text.index(".entry"))])
    code, count = Code(text[text.index(")", text.index(".entry")) + 1 :]), 32 * compiled.metadata.num_warps
    grid = (*grid, 1, 1)[:3]
    constants = {"%tid.x": np.arange(count)} | {f"%nctaid.{axis}": grid[i] for i, axis in enumerate("xyz")}
    for name, value in zip(names, flat, strict=False):  # behind them Triton has some of its own
        kind = "f32" if isinstance(value, float) else "s64"
        constants[name] = encode(np.full(count, value), kind).astype(np.int64)
    for number in np.ndindex(*grid[::-1]):
        constants |= {f"%ctaid.{axis}": place for axis, place in zip("zyx", number, strict=True)}
        registers = {name: np.full(count, value).astype(np.uint64) for name, value in constants.items()}
        Program(count, registers, memory, compiled.metadata.shared + 64).run(code)
    for place, tensor in places:
        data = tensor.view(torch.uint8)
        data.copy_(torch.from_numpy(memory[place : place + len(data)]))


def _flattened(value: Any, kind: Any) -> Iterator[Any]:
    """The parameters that a value becomes: none where it is a constant."""
    if isinstance(kind, tuple | list):
        for part, its_kind in zip(value, kind, strict=True):
            yield from _flattened(part, its_kind)
    elif kind != "constexpr":
        yield value
