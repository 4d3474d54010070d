"""Any decoder that transformers can build, with this engine's cache, attention and products.

An architecture without a class here is built by transformers. Its attention modules call a function that is
registered under a name; ours stores keys and values in the paged cache and attends to those of each
sequence, so that many sequences are computed as one row of tokens. Linear layers and plain experts become
this engine's, and norms, activations and rotations that compute the same on random input are replaced by its
kernels.

- `config.py` reads the configuration; `model.py` builds the model; `weights.py` maps names of tensors.
- `parts.py` has what stands in place of attention, `classes.py` attention that calls no function, and ALiBi;
  `faster.py` replaces the rest.
- `ranks.py` cuts the model by the plan that transformers has for it.

It needs `extensions/quantised` and `extensions/experts` for their weights. Windows, caps, sinks and slopes
are noted in `features` of each attention layer, for whoever builds the model: `extensions/models` sets them.
"""
