"""The engine in a process of its own: a client and a server, and the messages between them."""
