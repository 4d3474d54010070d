"""`python -m nanovllm.batch`: one answer for each line of a file of prompts, however large the file.

Lines are read when the engine has room for them and each answer is written as soon as it is there, so memory
does not grow with the file. Whatever ends a run, `--resume` goes on from what the output holds: a line is
appended by one system call, so an output has whole lines only.

- `lines.py`: what a line asks for, and the line that answers it.
- `files.py`: how files are read and written (JSON lines, text, Parquet).
- `ray.py`: several engines, on one host or many. `__main__.py`: the command.
"""
