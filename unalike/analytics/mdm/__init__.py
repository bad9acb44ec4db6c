"""MDM: a mixture of Dirichlet-multinomials that says how clients differ."""
