"""A federation on one machine: its plan, its clients as arrays, its rounds and their scores."""
