"""A network of sites: nodes dial out to a hub, and a run reaches them through it. Bytes only; no code travels."""
