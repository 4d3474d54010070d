"""The relatives of Qwen3 that have a class of their own, one file each with the facts of its model.

Most decoders differ in few things: norms on queries and keys, biases, a window of tokens that a layer attends
to, a mixture of experts in place of the MLP. Each file here says what its model changes and inherits the
rest. To add a model, read `qwen2.py`, which is ten lines.

`facts.py` says what else is to be known of a model, `config.py` and `rope.py` read it from files in every
spelling.

A window of tokens, a limit of scores and attention sinks change what attention itself computes:
`attention_rule.py` has them as hooks of the attention kernels and in torch. `windows.py` gives a finished
model the windows that its checkpoint asks for.

Mixtures of experts need `extensions/experts`.
"""
