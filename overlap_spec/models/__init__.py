"""Model architectures: one shared decoder, one small file an architecture."""
