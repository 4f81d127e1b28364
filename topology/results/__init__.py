"""The last edge: rows of the root join into result records, each once.

Knows query, plan, state and message.
"""
