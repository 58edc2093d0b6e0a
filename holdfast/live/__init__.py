"""A local page on which running experiments move: `holdfast watch`."""
