"""A mixture of experts: many small MLPs, of which a router picks a few for each token.

A token's MLP is the weighted sum of its `top_k` experts' outputs, so a model can hold ten times the weights
that one token reads. For an engine this changes the shape of the work. Each (token, expert) assignment is a
row of some expert's product; with many tokens every expert gets a handful of rows, and reading all experts'
weights once per step is the floor.

- `kernels/router.py` picks the experts and their weights; all ranks pick alike. Weights are probabilities, or
  in GLM-4.x sigmoids, to which a bias is added for the choice. Llama 4 weights inputs, see its class.
- `kernels/moe.py` chooses the kernels for a step's rows, and has their torch reference.
- `kernels/grouped_gemm.py` and `kernels/grouped_mxfp4.py` multiply the rows of all experts by one launch. The
  table that says which tile belongs to which expert stands on the device and the grid follows from sizes
  alone, so a CUDA graph can hold it. What all of them share (the launcher, `find_tile`, `store_tile`) is in
  `extensions/quantised/kernels/grouped_gemm.py`; grouped_fp8.py, grouped_codes.py and grouped_int4.py there
  are for layers without experts, too.
- `kernels/gemv.py` and `kernels/gemv_codes.py` serve a few tokens: one product an assignment.
- `moe.py` is the layer, with the MLP's signature. A rank holds a part of each expert's width. Shared experts,
  which compute all tokens, are an ordinary MLP beside the others; one sum over the ranks has both.
- `config.py` has what a `config.json` says of it.

The format of the weights decides which kernel multiplies them. In a decode step of few rows that is a gemv,
from gemv.py for dense weights and from gemv_codes.py for all others; beyond, and in every prefill, a grouped
GEMM:

| format                | layout of values         | scales are applied to       | gemv    | grouped GEMM    |
|-----------------------|--------------------------|-----------------------------|---------|-----------------|
| float32, 16 bits      | [out, in]                |                             | <= 4    | grouped_gemm    |
| fp8, a scale a row    | [out, in]                | sums                        | <= 4    | grouped_fp8     |
| fp8, 128 x 128 blocks | [out, in]                | sums over 128 inputs        | <= 4    | grouped_fp8     |
| fp8, before Ada       | [out, in]                | sums                        | never   | grouped_codes   |
| int8                  | [out, in]                | sums; small groups: values  | <= 4    | grouped_codes   |
| int4, nf4             | 32 inputs: 16 low halves | values; whole rows: sums    | <= 4    | grouped_codes   |
| MXFP4                 | of bytes, 16 high ones   | values                      | <= 4    | grouped_codes   |
| int4, rounded inputs  | "                        | sums over 128 inputs        | <= 4    | grouped_int4    |
| MXFP4, on Hopper      | bricks of 16 rows        | values, up to the row's     | <= 2    | grouped_mxfp4   |
|                       | and 128 such inputs      | largest one, which: sums    |         |                 |

Inputs are multiplied in their own dtype, but by grouped_fp8 and grouped_int4 in fp8, and by grouped_mxfp4 as
sums of two fp8 numbers. A gemv applies scales to sums over 16 or 32 inputs. Weights of any other format are
converted first and then multiplied as dense ones.

It needs `extensions/quantised` for the formats of its weights.
"""
