"""Every table and figure of the documents: what it claims, how it is computed again, and whether it holds."""
