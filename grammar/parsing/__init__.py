"""EBNF text read back into trees, and what backends need to know of these."""
