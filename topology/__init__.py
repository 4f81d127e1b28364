"""The pure core: no Kafka, disk, clock, randomness or async. Its rooms, from what is asked to what is proven:

    query      what is asked                                   knows nothing else
    plan       the trees that answer it                        query
    state      what is stored and found                        query's types
    message    what a step wants done and says                 state
    restraint  who says of a pair "not now", and until when    query, plan, state, message
    join       one step of one partition of a join node        query, plan, state, message, restraint
    ingest     from source records to blocks                   query, plan, state, message
    results    from the root's rows to result records          query, plan, state, message
    oracle     the answer by definition                        query
    testing    a whole mesh in one process                     all

`tests/test_tidy.py` has the same table as data.
"""
