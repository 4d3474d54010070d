"""Other ways to call the engine: asyncio, vLLM's names, lm-evaluation-harness.

- `async_llm.py`: many tasks over one engine, which runs in a thread of its own. Tasks and thread meet in two
  places only, an inbox of commands and each request's events.
- `engine_args.py` and `foreign_options.py`: what scripts written for vLLM pass. Options that change no result
  are accepted; those that would are refused with what to do instead.
- `lm_eval.py`: the harness's tasks, all requests of a task at once.
"""
