"""A segment store that writes down what changes, so that a step's changes are one batch.

Invariant: what was made and merged within one step is never written.
"""

from topology.message.effects import Effects
from topology.state.window_state import Run, Segment, SegmentStore, StateName


class Recorder:
    def __init__(self, store: SegmentStore, name: StateName) -> None:
        self.store, self.name = store, name
        self.puts: dict[int, tuple[Segment, Run]] = {}
        self.drops: list[int] = []

    def get(self, id: int) -> Run:
        return self.store.get(id)

    def put(self, segment: Segment, run: Run) -> None:
        self.puts[segment.id] = (segment, run)
        self.store.put(segment, run)

    def drop(self, id: int) -> None:
        if id in self.puts:
            del self.puts[id]
        else:
            self.drops.append(id)
        self.store.drop(id)

    def collect(self, effects: Effects) -> None:
        if self.puts or self.drops:
            effects.puts.extend((self.name, segment, run) for segment, run in self.puts.values())
            effects.drops.extend((self.name, id) for id in self.drops)
            self.puts, self.drops = {}, []
