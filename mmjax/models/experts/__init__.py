"""Mixture of experts: routers, grouped products, and layers whose tokens are computed by some of many mlps."""
