"""Ways to deal samples out to clients, and to make their inputs unlike."""
