"""Between tokens and text: chat templates, and text that grows token by token.

- `chat.py` has the checkpoint's chat template write a conversation.
- `detokenizer.py` turns a growing list of tokens into text. A token may be half a character, and a tokenizer
  may join it with the one before it: so a few settled tokens are always decoded together with the new ones,
  and text is only shown once no later token can change it.
"""
