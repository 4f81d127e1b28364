"""The answer by definition: nested loops over plain values (`truth`), expressions one row at a time (`evaluate`).

Shares nothing with the engine but the query.
"""
