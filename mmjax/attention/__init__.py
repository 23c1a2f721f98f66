"""Attention: token descriptions, masks, backends, and context parallelism (exchange and distribution of tokens)."""
