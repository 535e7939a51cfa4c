"""One file per algorithm: its formulas, its config, its small class. No actors, sockets or file formats."""
