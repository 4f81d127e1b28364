"""Feedback between joins (JIT): what a producer leaves out (`suspension`, `suspended`), what a consumer tells it
(`asking`, `demand`), how that travels (`wire`, `border`), and whether it pays (`policy`).
"""
