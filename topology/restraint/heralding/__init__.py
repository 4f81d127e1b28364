"""Heralds: composites wait for a fitting row of a stream that they meet further down (`heralding`); which heralds are
worth it (`heeding`).
"""
