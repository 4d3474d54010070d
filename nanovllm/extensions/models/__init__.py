"""The relatives of Qwen3, one file each with all facts of its model.

Most decoders differ in few things: norms on queries and keys, biases, a window of tokens that a layer attends
to, a mixture of experts in place of the MLP. So most classes here have attributes only: what a `config.json`
may leave out, which norms and biases there are, how GGUF files call it. `decoder.py` is the class behind
them, which says what there is to be known of a model; only Gemma 3, gpt-oss and Llama 4 compute anything in
another way, and `partial_rotation.py` is for GLM-4.x, which rotates half of each head, and for Llama 4, which
rotates neighbours. To add a model, read `qwen2.py`, which is ten lines.

`gguf.py` reads the fields that GGUF files hold: of these models, and of others that transformers builds.

`config.py` finds the model that a file names and, with `rope.py`, reads the file's fields in every spelling.

A window of tokens, chunks, a limit of scores, attention sinks and slopes (ALiBi) change what attention itself
computes: `attention_rule.py` has them as hooks of the attention kernels and in torch.

Mixtures of experts need `extensions/experts`.
"""
