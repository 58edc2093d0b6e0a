"""What a client lets out of its house, and what can be made of it."""
