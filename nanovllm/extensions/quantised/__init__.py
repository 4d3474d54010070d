"""Weights in 8 or 4 bits: what checkpoints store, and products that read it as it is.

A decode step of a few sequences takes as long as it takes to read the weights. With 8 or 4 bits a weight it
reads a half or a quarter, and the model takes that much less memory. A weight is then

    weight = (value - zero) * scale, perhaps + minimum

where one scale serves a scale group: a tensor, a row, a block of 128 x 128, or 16 to 128 inputs of a row.
Formats differ in the kind of value (integers, or floating point in 8 or 4 bits), the shape of a scale group,
and how checkpoints pack them. Read in this order:

- `scheme.py` and `formats.py`: which layers of a checkpoint have which format.
- `scaled.py`: what all formats share; `products.py`: what multiplies them, and what it leaves to the next
  product. The gemv is listed as the dense weight's, if that has one.
- `fp8.py`, `int8.py`, `int4.py` (compressed-tensors, GPTQ, AWQ), `mxfp4.py`, `gguf.py` (`gguf_blocks.py`
  decodes its blocks): one file each.
- `kernels/quantised_weight.py`: how packed values become numbers on a GPU; `kernels/quantised_matvec.py` for
  one or two rows, `kernels/quantised_linear.py` for some more. `kernels/fp8_linear.py` multiplies in 8 bits:
  the activations are quantised too, as part of the norm or activation that computes them.

Products of many rows are bound by arithmetic, not by bytes: there 4-bit weights are converted first.
"""
