"""Data sets: where images come from, how they are decoded and cached."""
