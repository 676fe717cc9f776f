"""Training of the embedded model and of EAGLE-3 draft heads."""
