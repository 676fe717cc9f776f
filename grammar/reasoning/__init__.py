"""Thinking before the answer: the markers around it, a reply split by them, and its matcher."""
