#!/usr/bin/env python3
"""Which tiles multiply weights of 4 or 8 bits fastest on this GPU, by rows, for Qwen3-8B's four shapes.

    python tests/long/tiles.py --rows 8 64 256
    python tests/long/tiles.py --kernel int4 --rows 256

`codes` is the product of inputs in bfloat16 (kernels/grouped_codes.py), `int4` that of inputs in 8 bits
(kernels/grouped_int4.py), `fp8` that of weights in 8 bits as well (kernels/grouped_fp8.py). Every product
reads other weights than the one before it, as in a model; a CUDA graph of them is timed, and each tile is
quoted by the median. Of each case the five fastest are printed, and the tile that the engine takes.
"""

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator

import torch

from nanovllm.extensions.quantised.kernels import grouped_codes, grouped_fp8, grouped_int4
from nanovllm.extensions.quantised.kernels.fp8_linear import quantise
from nanovllm.extensions.quantised.kernels.grouped_gemm import GroupedProduct, Tile, with_splits
from nanovllm.extensions.quantised.kernels.permute_k import permute_k
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight

MODULES = {"codes": grouped_codes, "int4": grouped_int4, "fp8": grouped_fp8}
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate and up": (24576, 4096), "down": (4096, 12288)}
CACHED = 200 << 20  # bytes of weights, more than any L2 cache holds
REPEATS = 7


def make_weight(kernel: str, shape: tuple[int, int], group: int) -> QuantisedWeight:
    out_features, in_features = shape
    if kernel == "fp8":
        codes = torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn)
        return QuantisedWeight(codes, shape, torch.rand(out_features, 1, device="cuda"), (1, 0))
    codes = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(out_features, in_features // group, device="cuda").bfloat16() / 100
    return QuantisedWeight(codes, shape, scales, (1, group), zero_point=8)


def candidates(kernel: str, rows: int, shape: tuple[int, int]) -> Iterator[Tile]:
    sizes = (16, 32, 64, 128, 256), (64, 128, 256), (128,) if kernel == "int4" else (128, 256)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    found = set()
    for block_m, block_n, block_k, warps, stages, programs in itertools.product(
        *sizes, (4, 8), (4, 6) if kernel == "fp8" else (3, 4), (1, 2, 4)
    ):
        suits_rows = rows <= 4 * block_m and block_m < max(2 * rows, 17)
        if suits_rows and block_n >= 16 * warps and block_m * block_n <= 128 * 32 * warps:
            tile = Tile(block_m, stages, block_n, block_k, warps)
            found.add(with_splits(tile, rows, shape, programs * processors))
    yield from sorted(found)


def time_of(multiply: Callable[[QuantisedWeight], None], weights: list[QuantisedWeight]) -> float:
    """Microseconds of a product."""
    multiply(weights[0])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            multiply(weight)
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(times)


def products(kernel: str, rows: int, shape: tuple[int, int]) -> Callable[[QuantisedWeight, Tile], None]:
    """What multiplies random inputs by a weight."""
    x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, shape[0], device="cuda", dtype=torch.bfloat16)
    if kernel == "codes":
        inputs, run = permute_k(x, 2), grouped_codes.multiply_codes
    elif kernel == "fp8":
        inputs, run = quantise(x, 0), grouped_fp8.multiply_fp8
    else:
        inputs, run = quantise(x, 0, 2), grouped_int4.multiply_int4
    return lambda weight, tile: run(inputs, weight, GroupedProduct(None, None, out, tile))


def can_run(case: tuple[str, int, str, int, Tile]) -> bool:
    """Compile a tile, in a process of its own: whether the GPU has the shared memory that it takes."""
    kernel, rows, name, group, tile = case
    try:
        products(kernel, rows, SHAPES[name])(make_weight(kernel, SHAPES[name], group), tile)
    except Exception as error:
        if "out of resource" not in str(error).lower():
            raise
        return False
    return True


def measure(kernel: str, rows: int, name: str, group: int, tiles: list[Tile]) -> None:
    shape = SHAPES[name]
    weights = [make_weight(kernel, shape, group) for _ in range(max(2, CACHED * 2 // (shape[0] * shape[1])))]
    multiply = products(kernel, rows, shape)
    times = {tile: time_of(lambda weight, tile=tile: multiply(weight, tile), weights) for tile in tiles}
    chosen = chosen_tile(kernel, rows, weights[0])
    print(f"{kernel}, {rows} rows, {name}: {times[chosen]:.1f} us with {chosen}")
    for tile in sorted(times, key=times.get)[:5]:
        print(f"    {times[tile]:.1f} us with {tile}", flush=True)


def chosen_tile(kernel: str, rows: int, weight: QuantisedWeight) -> Tile:
    return MODULES[kernel].linear_tile(rows, weight, weight.codes.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernel", choices=MODULES, default="codes")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    args = parser.parse_args()
    cases: dict[tuple, list[Tile]] = {}
    for rows, name in itertools.product(args.rows, args.shapes):
        chosen = chosen_tile(args.kernel, rows, make_weight(args.kernel, SHAPES[name], args.group))
        tiles = {*candidates(args.kernel, rows, SHAPES[name]), chosen}
        cases[args.kernel, rows, name, args.group] = sorted(tiles)
    flat = [(*case, tile) for case, tiles in cases.items() for tile in tiles]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        fits = dict(zip(flat, pool.map(can_run, flat), strict=True))
    for case, tiles in cases.items():
        measure(*case, [tile for tile in tiles if fits[(*case, tile)]])


if __name__ == "__main__":
    main()
