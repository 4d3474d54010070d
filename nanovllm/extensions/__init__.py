"""Everything the engine can do beyond the core, one folder a capability.

Each folder's `__init__.py` opens with a page that teaches the idea. An extension imports the core and itself;
five edges more are allowed: models -> experts -> quantised, transformers -> experts and quantised,
checkpoints -> quantised. assembly.py puts an engine together from them all. Programs with a command line
(batch, server, bench) call the public `nanovllm`, as a user's script does.
"""
