"""A run before, while and after it goes on: its plan, its folder, what clients remember, who looks on."""
