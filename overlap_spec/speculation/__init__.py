"""Length policies: how much a step drafts."""
