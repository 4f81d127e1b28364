"""librdkafka calls `on_assign` from within `consume`, which may give the first records of the new partitions in the
same call: none may be lost."""

from confluent_kafka import TopicPartition

from services.simulation.world import World


def test_records_that_come_with_their_assignment_are_kept() -> None:
    tables = 0
    for seed in range(80):
        world = World(seed)
        with world.patched():
            world.append(len(world.coming))
            ingest = world.start("ingest").ingest  # type: ignore[attr-defined]
            core = ingest.core
            consumer, consume = ingest.consumer, ingest.consumer.consume
            places = [TopicPartition(topic, p) for topic, p in (*core.backlogs, *core.tables)]
            core.backlogs, core.tables = {}, {}

            def assigning(count: int, wait_s: float) -> object:
                ingest._assigned(consumer, places)  # noqa: B023
                return consume(count, wait_s)  # noqa: B023

            consumer.consume = assigning
            ingest._fetch(0)
            read = {
                place: at
                for place, at in consumer.positions.items()
                if at and place in core.tables and not core.is_loaded_table(place)
            }
            assert all(len(core.tables[place]) == at for place, at in read.items()), f"seed {seed}"
            tables += len(read)
    assert tables > 10
