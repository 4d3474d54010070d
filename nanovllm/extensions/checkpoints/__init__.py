"""Where else models come from: GGUF files, the Hugging Face hub, adapters, and the names of shapes.

The core reads a folder of safetensors files. This extension opens (`opening.py` tells them apart)

- `gguf.py`: a GGUF file (`gguf_file.py` reads its header, `gguf_tokenizer.py` makes its tokenizer), whose
  tensors stay quantised until sliced;
- `pickled.py`: a folder of files of `torch.save`, where it has no safetensors;
- `hub.py`: a hub id, of which only the files that are needed are downloaded, or one GGUF file there;
  `smollm2.py`: a first model;
- `adapter.py`: a LoRA adapter, merged into the weights as they are read;
- `text_part.py`: of a model that also reads images, the part that reads text;
- `recommended.py`: what a checkpoint recommends for sampling, in its generation_config.json;
- `support.py`: what a model is, whether it loads and how much memory it takes, without its weights;
- `made_up.py`: random weights in the shape of a well-known model, for measuring speed.

Checkpoints are other people's files. `untrusted.py` checks that no name or link in a folder leads out of it
and that no file is too large to read; `library_errors.py` makes a ValueError of whatever libraries make of
them, also as long as a tokenizer is used. Nothing in a checkpoint is executed. `names.py` finds a model's
tensors under the names that some files have for them.

It needs `extensions/quantised`, whose `gguf_blocks.py` decodes the blocks of GGUF's types.
"""
