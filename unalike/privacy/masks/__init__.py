"""Secure sums as arithmetic: shares, masks, and the two sides of the protocol. No exchange happens here."""
