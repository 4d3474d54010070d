"""Faster matrix products for decode batches, with their neighbours folded in.

A decode step multiplies few rows by large weights, so its time is the time to read the weights plus whatever
is lost between kernels. In a layer of Qwen3-0.6B a product takes a few microseconds, about as long as it
takes to start a kernel, wait for its first bytes and drain it. The library's products leave RMSNorm, the
residual addition and SwiGLU to kernels of their own, each of which pays that price again.

Three kernels remove it:

- `kernels/gemv.py`, for one or two rows: one pass over the weight at memory bandwidth, which
  normalises its input, applies SwiGLU and adds the residual itself. Each program asks for its weights before
  it waits for its input.
- `kernels/fused_linear.py`, for decode batches of small models: tiles on tensor cores. RMSNorm needs the sum
  of squares of a whole row, which no tile has. So the norm is split: the product before it multiplies by the
  norm's weight and leaves partial sums of squares, and the product behind it divides by their root.
- `kernels/small_gemm.py`, the same for up to eight rows. A program's rows of the weight are so few that it
  can load all of them while the kernel before it still computes.

`products.py` lists them for the core's layers. None changes what is computed, only where it is rounded. In
larger models few rows are multiplied by the product of `extensions/exact`, which is faster there than the
library. A prefill and large batches stay with the library, whose products are bound by arithmetic there.
"""
