"""EBNF text parsed into trees, and the analyses that backends need."""
