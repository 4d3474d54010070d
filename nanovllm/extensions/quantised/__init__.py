"""Weights in 8 or 4 bits: what checkpoints store, and products that read it as it is.

A decode step of a few sequences takes as long as it takes to read the weights. With 8 or 4 bits a weight it
reads a half or a quarter, and the model takes that much less memory. A weight is then

    weight = (value - zero) * scale, perhaps + offset

where one scale serves a scale group: a tensor, a row, a block of 128 x 128, or 16 to 128 inputs of a row.
Formats differ in the kind of value, the shape of a scale group, and how checkpoints pack them. In memory, and
by the rows of x that a GPU multiplies in bfloat16 (in float16 alike, but fp8 as int8):

| format | values | besides | scales multiply | 1, 2 rows | to 256 rows | more rows |
|---|---|---|---|---|---|---|
| fp8, a scale a row | bytes, e4m3 | | sums | gemv | 8 bits | 8 bits |
| fp8, blocks | bytes, e4m3 | | sums of 128 inputs | gemv | 8 bits | 8 bits |
| int8, a scale a row | bytes, signed | zeros | sums | gemv | codes | converted |
| NVFP4, MXFP4 by compressed-tensors | halves, places in a table | | values | gemv | codes | converted |
| int8 in groups, GPTQ with 8 bits | bytes, signed | zeros | values | gemv | codes | converted |
| int4, GPTQ, AWQ | halves of bytes | zeros, or 8 | values | gemv | codes | converted |
| nf4 of bitsandbytes | halves, places in a table | | values | gemv | codes | converted |
| GGUF's types | bytes or halves | offsets, or 8 | values | gemv | codes | converted |
| MXFP4 | halves, e2m1 | | values | see `extensions/experts` | | |

Where values are halves of bytes, 32 inputs are 16 bytes, the first 16 in their low halves.

- *gemv*, `kernels/quantised_matvec.py`: in decode steps, in float16 too, from compute capability 8.0 on (fp8:
  8.9). Here scales multiply the sums of 16 or 32 inputs, whatever the format.
- *8 bits*, `kernels/fp8_linear.py`: from 8.9 on (blocks: 9.0), beside the residual stream; else as int8. The
  activations are quantised too, as part of the norm or activation that computes them. Up to 64 rows of a
  decode step `kernels/grouped_fp8.py` multiplies, for more torch's library.
- *codes*, `kernels/grouped_codes.py`: from 8.0 on. It wants the columns of x in another order, which the norm
  or the activation in front of it gives them (`CodesProduct`). Mixtures of experts have the same kernel: a
  layer is one expert, whose rows all tokens are.
- With `activation_dtype="fp8"` int4, GPTQ and AWQ with scales for a multiple of 128 inputs have another
  product for more than 64 rows (experts: for all but a gemv's), `kernels/grouped_int4.py`: inputs are rounded
  to 8 bits, and the codes, which are numbers in e4m3 as they stand, are multiplied exactly. For more than
  1,024 rows codes are moved into bytes first, for torch's library. On Hopper GPUs.
- *converted*, `dequantise` of `kernels/quantised_weight.py`: the library multiplies by a weight in x's dtype.

A gemv in 8 bits takes 1.35 times as long as reading the weights, in 4 bits 1.7 to 2.3 times; for 64 rows 8
bits take twice as long, codes of 4 bits 3.5 to 4 times (docs/measurements.md has each, on an H100).

`dequantise_torch` is the reference of all. It also serves CPUs, in pieces; `gguf.py` has a product for them.

Read in this order:

- `scheme.py` and `formats.py`: which layers of a checkpoint have which format. `compressed_tensors.py` and
  `gptq.py` read the longer configurations; `assignment.py` gives layers their weights.
- `scaled.py`: what all formats share, also how checkpoints name tensors and pack codes (`Source`);
  `products.py`: what multiplies them, and what it leaves to the next product. The gemv is listed as the dense
  weight's, if that has one.
- `fp8.py`, `fp4.py`, `integers.py`, `bitsandbytes.py`, `gguf.py` (`gguf_blocks.py` decodes its blocks): the
  formats.
- `kernels/quantised_weight.py`: what kernels know of a weight. How its packed values become numbers on a GPU:
  `kernels/to_numbers.py`, those of nf4 `kernels/nf4.py`, and in the steps of a gemv, which those of experts
  take as well, `kernels/multiply_words.py`.
"""
