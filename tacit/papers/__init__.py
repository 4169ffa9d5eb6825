"""What serves one paper: its figures, its measures."""
