"""What is stored and found: hashes, validity, runs of rows, window states in segments and slices, what stored rows show
and when they came, pairs that were found and are not built.

Knows the query's types at most; nobody's reasons for looking.
"""
