"""The published tables and figures of LGA's paper, ours beside them, and their pages."""
