"""The systems that are measured side by side; each answers the same tasks in its own file."""
