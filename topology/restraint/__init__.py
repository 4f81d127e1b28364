"""Who says of a pair "not now", and when it is let go: `interface` has the one rule and the one small interface.

    suspension/  feedback (JIT): pairs that show a value the consumer has no partner for
    heralding/   pairs that no heralded row fits yet
    hiding       rows of an M-Join that cannot become part of a result yet

None knows another or the inside of `join`. What several use lies beside `interface`: tables of values and the moments
they were held (`tables`, `values`, `intervals`), what has no partner (`detection`), which rows wait (`waiting`).
"""
