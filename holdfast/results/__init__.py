"""Records of runs, and the tables, plots and reports made from them."""
