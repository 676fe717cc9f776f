"""Bodies of HTTP requests. Strict: an unknown field or a wrong type is an error."""
