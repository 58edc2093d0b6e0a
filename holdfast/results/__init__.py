"""Records of runs, and all that is read out of them."""
