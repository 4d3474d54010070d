"""`python -m nanovllm`, see extensions/server."""

from nanovllm.extensions.server.__main__ import main

if __name__ == "__main__":
    main()
