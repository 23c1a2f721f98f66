"""Vision transformers over packed patches."""
