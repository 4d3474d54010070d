"""The command `nanovllm`, which is also `python -m nanovllm`.

- `__main__.py`: its commands, each of which reads its own options.
- `terminal.py`: `chat` and `generate`, a model in a terminal that shows texts as they are made.
"""
