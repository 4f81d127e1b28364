"""A whole mesh in one process, every channel under the test's hand.

Knows all rooms.
"""
