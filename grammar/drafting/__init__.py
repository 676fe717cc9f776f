"""What a grammar tells drafts: forced runs, states by bytes, and texts that are few."""
