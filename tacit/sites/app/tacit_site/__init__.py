"""The Flower app of tacit: two thin files."""
