"""Vocoders: waveforms of log-mel frames."""
