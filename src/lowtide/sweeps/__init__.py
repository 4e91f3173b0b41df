"""Grids of runs that survive what kills one of them."""
