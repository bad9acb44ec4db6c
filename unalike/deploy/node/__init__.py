"""A node: one site's part of a network. It decides by its own policy what it does, and keeps its own ledger."""
