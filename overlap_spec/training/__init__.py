"""Training of EAGLE-3 draft heads for a user's own target."""
