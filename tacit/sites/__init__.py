"""Real sites: each party's data stays on its own machine, and Flower carries what is sent."""
