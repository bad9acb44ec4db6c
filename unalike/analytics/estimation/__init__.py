"""Personalized estimation: means, rates and regressions that borrow strength from other clients."""
