"""Clients, the global server, and what passes between them."""
