"""What is asked: the text of a query, its expressions and their types, selections, windows and equalities.

Knows nothing else of the core. `cql.parse_query` is the way in, a `query.Query` what comes out.
"""
