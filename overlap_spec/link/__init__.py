"""The link between a front process and the engine's process: messages, and one end each."""
