"""Items and keys that must differ: where (`plan`), what a text has (`text`), and the `matcher`."""
