"""How the embedded model is made: ``python -m examples.embedded_model``."""
