"""Grammars of every kind as rules and tokens: `lower` is the door, `schema` that of JSON Schema."""
