"""How a checkpoint is padded: sizes, tensors, tokenizer."""
