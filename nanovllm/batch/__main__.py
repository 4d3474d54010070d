"""`python -m nanovllm.batch`, see extensions/batch."""

from nanovllm.extensions.batch.__main__ import run_command

if __name__ == "__main__":
    run_command()
