"""The one representation of a grammar, between what is read or lowered and what backends write."""
