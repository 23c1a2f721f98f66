"""Gated delta networks: layers that keep a state of fixed size in place of all keys and values."""
