"""What comes in over the wire. Strict: an unknown field or a wrong type is an error."""
