"""A real Kafka broker on this machine with nothing but Java: fetched once, started in a folder of its own.

Invariant: what is started here is Apache Kafka itself (KRaft, one process), never an imitation.
"""

from services.broker.local import LocalBroker

__all__ = ["LocalBroker"]
