"""What `python bench.py` can measure beyond its page; `nanovllm bench` is the same command.

An offline engine is judged by output tokens per second over a whole piece of work: from the first prompt
handed in to the last token of the last sequence. What decides it is how many sequences are computed together,
so the work must be large, and its lengths must differ: sequences end one after another, and others take their
room. The default, 256 prompts of 100 to 1,024 random tokens with 100 to 1,024 tokens of output, is the work
that engines of this kind are compared on. Token ids are random because only their number costs time, and
end-of-sequence tokens are ignored so that every engine computes equally many.

- A warm-up goes first: every batch size once, so that kernels are compiled and CUDA graphs captured.
- Then come repetitions with the same lengths and the same shared prefixes but other token ids: else a
  repetition would find its prompts in the prefix cache. The median counts; slowest and fastest are told too.
- Prefill and decode are timed apart. Prefill is bound by arithmetic; decode reads all weights, and the keys
  and values of every sequence, for a token each, and so is bound by memory.
- That gives a floor: the operations and bytes of the work, divided by what the device is measured to reach
  just before. Floor divided by time is the share of the speed possible that the engine makes.

Files: `workloads.py` is the work, `engine.py` times this engine, `others.py` transformers and llama.cpp,
`floor.py` says what would be possible, `structured.py` times answers that fit JSON schemas beside free ones,
`report.py` writes figures down and draws them, and `__main__.py` reads the command line.
"""
