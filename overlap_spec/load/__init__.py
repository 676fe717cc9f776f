"""Load on servers with OpenAI's API, whoever made them: requests, clients, and figures."""
