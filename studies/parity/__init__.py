"""Appendix C of Karnati et al. (2026): the same training under 36 layouts, whose losses have to agree.

Unlike other studies it trains: `python -m studies parity --curves`.
"""
