"""Files of prompts: `python -m nanovllm.batch`. See extensions/batch."""
