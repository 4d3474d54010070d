"""A mixture of experts: many small MLPs, of which a router picks a few for each token.

A token's MLP is the weighted sum of its `top_k` experts' outputs, so a model can hold ten times the weights
that one token reads. For an engine this changes the shape of the work. Each (token, expert) assignment is a
row of some expert's product; with many tokens every expert gets a handful of rows, and reading all experts'
weights once per step is the floor.

- `kernels/router.py` picks the experts and their weights; all ranks pick alike.
- `kernels/experts.py` sorts assignments by expert and says which tile of rows belongs to which expert. The
  table stands on the device and the grid follows from sizes alone, so a CUDA graph can hold it.
- `kernels/moe.py` is the grouped GEMM: one launch multiplies every expert's rows. `kernels/moe_fp8.py`,
  `kernels/moe_quantised.py` and `kernels/moe_mxfp4.py` are the same for weights of 8 and 4 bits.
- `kernels/moe_matvec.py` and `kernels/moe_quantised_matvec.py` serve a few tokens: one product an assignment.
- `moe.py` is the layer, with the MLP's signature. A rank holds a part of each expert's width.
- `config.py` has what a `config.json` says of it.

It needs `extensions/quantised` for the formats of its weights.
"""
