"""One file an architecture: what its ``config.json`` says of the shared decoder."""
