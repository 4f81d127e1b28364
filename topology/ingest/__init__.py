"""The first edge, a state machine too: source records into blocks for the join nodes (`ingest`): which are events
(`decode`), late (`reading`) or of a table (`table`), who waits for whom (`alignment`), where they go (`routing`), by
which plan (`epochs`), and as what (`blocks`).

Knows query, plan, state and message.
"""
