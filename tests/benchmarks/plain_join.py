"""What a good engineer writes by hand: one process, confluent-kafka, msgspec, dicts of deques. No state store, no
recovery, at-least-once.

Measured in the same run as the mesh, so that the machine's mood cancels out. Arguments: bootstrap, the two topics, the
output topic, window ms.
"""

import signal
import sys
import time
from collections import deque
from typing import Any

import msgspec
from confluent_kafka import Consumer, Producer


class Event(msgspec.Struct, gc=False):
    id: int
    ts: int
    x: int


class Side:
    def __init__(self) -> None:
        self.rows: dict[int, deque[tuple[int, int]]] = {}
        self.order: deque[tuple[int, int]] = deque()

    def add(self, key: int, time_ms: int, id: int) -> None:
        queue = self.rows.get(key)
        if queue is None:
            queue = self.rows[key] = deque()
        queue.append((time_ms, id))
        self.order.append((time_ms, key))

    def expire(self, before: int) -> None:
        while self.order and self.order[0][0] < before:
            key = self.order.popleft()[1]
            queue = self.rows[key]
            queue.popleft()
            if not queue:
                del self.rows[key]


def main() -> None:
    bootstrap, left, right, out, window = *sys.argv[1:5], int(sys.argv[5])
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"plain-{time.time()}",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 50,
        }
    )
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 500_000})
    consumer.subscribe([left, right])
    running = True

    def stop(*_: Any) -> None:
        nonlocal running
        running = False

    signal.signal(signal.SIGTERM, stop)
    sides = {left: Side(), right: Side()}
    newest: dict[tuple[str, int], int] = {}
    decode, encode = msgspec.json.Decoder(Event).decode, msgspec.json.encode
    first = True
    while running:
        for message in consumer.consume(2000, 0.2):
            if message.error() is not None:
                continue
            if first:
                print("first", time.time(), flush=True)
                first = False
            event, topic = decode(message.value()), message.topic()
            place = (topic, message.partition())
            newest[place] = max(newest.get(place, 0), event.ts)
            sides[topic].add(event.x, event.ts, event.id)
            other = sides[right if topic == left else left].rows.get(event.x, ())
            for time_ms, id in other:
                if -window <= time_ms - event.ts <= window:
                    a, b = (event.id, id) if topic == left else (id, event.id)
                    while True:
                        try:
                            producer.produce(out, encode({"a_id": a, "b_id": b}))
                            break
                        except BufferError:
                            producer.poll(0.05)
        producer.poll(0)
        if len(newest) == 8:
            before = min(newest.values()) - window - 1000
            for side in sides.values():
                side.expire(before)
    producer.flush()


if __name__ == "__main__":
    main()
