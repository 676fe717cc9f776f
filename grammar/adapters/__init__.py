"""Grammars in other libraries' generation, one file a library."""
