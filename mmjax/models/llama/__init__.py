"""Llama-family language models: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""
