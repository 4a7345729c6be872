"""Servers that answer for a teacher, and the client that asks them."""
