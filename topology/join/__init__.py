"""One step of one partition of a join node: `partition.step` is the list of stages; what is refused (`admission`), seen
before (`arrivals`), made (`kernel`, over the half joins of `half_join` in the order of `routing`), said and numbered
(`voice`), remembered (`memo`) and recorded to be stored (`recording`).

Knows plan, state, message and the interface of restraints; which restraints there are, only `partition` does.
"""
