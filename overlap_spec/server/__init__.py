"""The HTTP server: OpenAI's shapes, SGLang's `/generate`, and what operators need."""
