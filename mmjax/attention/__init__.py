"""Attention: what is known of the tokens, masks, ways to compute it, and which rank computes which tokens."""
