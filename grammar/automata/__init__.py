"""Regular languages: sets of characters, regular expressions as trees, and automata."""
