"""What Numba lacks here: vectors of 16 numbers, the instruction for dots of bytes, and OpenMP's threads.

Each function writes LLVM's language, which becomes a few instructions in the middle of a compiled function.
LLVM splits vectors into what a CPU has. Addresses are int64, of any alignment.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from nanovllm.extensions.cpu.packing import BYTES, GROUP, HALVES, LANES, NIBBLES

DIGIT_BITS = 7  # of the low digit of an input
TOP = 0xFFFF0000  # of a word's bits, which as float32 are its second bfloat16
BYTE, WORD, FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)
# Users may tell Numba to compile for another CPU than this one.
IS_HOST = not (config.CPU_NAME or config.CPU_FEATURES)
HAS_DOT = IS_HOST and binding.get_host_cpu_features().get("avx512vnni", False)


class Floats(types.Type):
    """A vector of LANES float32."""


@register_model(Floats)
class FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Floats):
        super().__init__(manager, kind, FLOATS)


floats = Floats("floats")


def splat(b: ir.IRBuilder, value: Any, kind: ir.VectorType) -> Any:
    empty = ir.Constant(kind, ir.Undefined)
    return b.shuffle_vector(b.insert_element(empty, value, WORD(0)), empty, ir.Constant(WORDS, None))


def same(number: int) -> ir.Constant:
    return ir.Constant(WORDS, [number] * LANES)


def read(b: ir.IRBuilder, address: Any, offset: int, kind: ir.Type) -> Any:
    return b.load(b.inttoptr(b.add(address, address.type(offset)), kind.as_pointer()), align=1)


def external(b: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, arguments), name)


def dot4(b: ir.IRBuilder, total: Any, codes: Any, x: Any) -> Any:
    """In each lane: total + the products of four unsigned bytes of codes and the four signed ones of x."""
    if HAS_DOT:
        dot = external(b, "llvm.x86.avx512.vpdpbusd.512", WORDS, WORDS, WORDS, WORDS)
        return b.call(dot, [total, codes, splat(b, x, WORDS)])
    for shift in (0, 8, 16, 24):
        code = b.and_(b.lshr(codes, same(shift)), same(255))
        number = b.ashr(b.shl(x, WORD(24 - shift)), WORD(24))
        total = b.add(total, b.mul(code, splat(b, number, WORDS)))
    return total


def block_adder(kind: int) -> Callable:
    """
    For blocks of this kind: total + the products of a block and of a group of x, which has this scale and
    these sums of its halves: the high digits of GROUP numbers, then the low ones.
    """
    middle, num_words = (8, GROUP // 8) if kind == NIBBLES else (128, GROUP // 4)
    num_parts = 2 if kind == HALVES else 1  # that have a scale each

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: tuple) -> Any:
        total, block, x, scale, *sums = values
        sums = sums if kind == HALVES else [b.add(*sums)]
        pairs = read(b, block, 0, WORDS)
        factors = [b.bitcast(bits, FLOATS) for bits in (b.shl(pairs, same(16)), b.and_(pairs, same(TOP)))]
        dots = []
        for part in range(num_parts):
            digits = [ir.Constant(WORDS, None), splat(b, b.mul(sums[part], WORD(-middle)), WORDS)]
            for i in range(part * num_words // num_parts, (part + 1) * num_words // num_parts):
                codes = read(b, block, 4 * LANES * (i + 1), WORDS)
                for half in range(2 if kind == NIBBLES else 1):
                    bits = b.and_(b.lshr(codes, same(4 * half)), same(0x0F0F0F0F)) if middle == 8 else codes
                    for digit in range(2):
                        word = read(b, x, GROUP * digit + 4 * (i + num_words * half), WORD)
                        digits[digit] = dot4(b, digits[digit], bits, word)
            dots.append(b.sitofp(b.add(b.shl(digits[0], same(DIGIT_BITS)), digits[1]), FLOATS))
        scales = factors[:num_parts]
        terms = [(dot, b.fmul(y, splat(b, scale, FLOATS))) for dot, y in zip(dots, scales, strict=True)]
        if kind != HALVES:  # the second factor is the zero
            terms.append((splat(b, b.fmul(scale, b.sitofp(sums[0], FLOAT)), FLOATS), factors[1]))
        for x, y in terms:
            total = b.fadd(total, b.fmul(x, y, flags=("contract",)), flags=("contract",))
        return total

    @intrinsic
    def add_block(context, total, block, x, scale, first, second):
        numbers = types.int64, types.int64, types.float32, types.int32, types.int32
        return floats(floats, *numbers), write

    return add_block


add_nibbles, add_bytes, add_halves = map(block_adder, (NIBBLES, BYTES, HALVES))


@intrinsic
def as_float(context, bits):
    return types.float32(types.int32), lambda context, b, signature, values: b.bitcast(*values, FLOAT)


@intrinsic
def load(context, address):
    return floats(types.int64), lambda context, b, signature, values: read(b, *values, 0, FLOATS)


@intrinsic
def store(context, address, value):
    def write(context: Any, b: ir.IRBuilder, signature: Any, values: tuple) -> Any:
        b.store(values[1], b.inttoptr(values[0], FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, floats), write


@intrinsic
def barrier(context):
    def write(context: Any, b: ir.IRBuilder, signature: Any, values: tuple) -> Any:
        b.call(external(b, "GOMP_barrier", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.none(), write


@intrinsic
def on_threads(context, work, arguments, threads):
    """work(arguments, thread, threads) on up to so many threads of OpenMP."""
    signature = types.none(arguments, types.int32, types.int32)

    def write(context: Any, b: ir.IRBuilder, _: Any, values: tuple) -> Any:
        kept, address = cgutils.alloca_once_value(b, values[1]), BYTE.as_pointer()
        body = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [address]), f"{b.function.name}.body")
        body.linkage = "internal"
        inner = ir.IRBuilder(body.append_basic_block())
        team = [inner.call(external(b, f"omp_get_{x}", WORD), []) for x in ("thread_num", "num_threads")]
        its_arguments = inner.load(inner.bitcast(body.args[0], kept.type))
        function = context.compile_subroutine(inner, work.dispatcher.py_func, signature)
        context.call_internal_no_propagate(inner, function.fndesc, signature, [its_arguments, *team])
        inner.ret_void()
        run = external(b, "GOMP_parallel", ir.VoidType(), body.type, address, WORD, WORD)
        b.call(run, [body, b.bitcast(kept, address), values[2], WORD(0)])
        return context.get_dummy_value()

    return types.none(work, arguments, types.int32), write
