"""The proxy: who picks the old models that clients distil from."""
