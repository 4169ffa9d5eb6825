"""Where images come from (sources), who holds them (split), and what each side may see of them (federation)."""
