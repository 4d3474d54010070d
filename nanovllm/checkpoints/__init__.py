"""Where a model comes from: here a folder of safetensors files, which is what the core reads.

The rest of the engine asks a checkpoint for its configuration, tokenizer and tensors, and does not know of
which kind it is. Nothing in a checkpoint is executed. Checkpoints of every kind have, besides what
`Checkpoint` gives them:

- `fields()`: what config.json says, or would say;
- `tokenizer()`: a tokenizer of transformers, or None;
- `tensors()`, if weights are not random: objects with `name` (Hugging Face's), `file` and `shape`; slices are
  torch tensors, read when they are taken.
"""
