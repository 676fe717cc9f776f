"""Inputs of maskbench: instances in the key order of their schema, and tokenizers."""
