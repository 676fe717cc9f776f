"""Regular languages: character sets, regular expression trees, and automata."""
