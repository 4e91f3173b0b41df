"""What runs left behind, as tables, plots and one page."""
