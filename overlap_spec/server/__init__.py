"""The HTTP server: OpenAI's API, SGLang's `/generate`, and routes for operators."""
