"""The global server: it grows the head, aggregates replies and evaluates the model."""
