"""Tool calls: what a request declares, each model's spelling of calls, and how replies are read."""
