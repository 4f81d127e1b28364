"""What a step wants done, as data, and how what several steps say becomes one block.

Knows what is stored; the types of what crosses a topic are in `schemas`.
"""
