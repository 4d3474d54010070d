"""A quick start: kernels are compiled in processes of their own while the weights load.

Triton compiles a kernel when it is first launched, and the engine launches some thirty. One after another
they would keep the first request waiting. `compile_ahead.py` forks processes that run the engine's steps on
the CPU without computing anything and compile each kernel instead of launching it; the engine then finds
them in Triton's cache on disk. `record_ahead.py` records the CUDA graphs of smaller batches while larger ones
are computed, `short_prefills.py` those of prefills that a GPU would finish before the host, `graph_trial.py`
tries out whether a model's step can be captured, and `memory.py` explains what can be done when memory runs
out.
"""
