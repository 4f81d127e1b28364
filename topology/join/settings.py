"""How a node's partitions are run: values that are handed in.

Invariant: settings change when work is done and how it is cut, never results.
"""

from dataclasses import dataclass, field

from schemas.block import MAX_BLOCK_BYTES
from schemas.mesh import Feedback, Routing
from topology.restraint.detection import ROWS_LEAST
from topology.restraint.heralding.heeding import Weights as HeedingWeights
from topology.restraint.suspension.policy import Weights as FeedbackWeights


@dataclass(frozen=True)
class Settings:
    feedback: Feedback = "off"  # whether joins tell their producers what not to make
    heralds: bool = False  # whether they are told of streams that their rows meet further down
    routing: Routing = "fixed"  # in which order rows of an M-Join meet its inputs
    block_bytes: int = MAX_BLOCK_BYTES  # what blocks are cut to
    weights: FeedbackWeights = field(default_factory=FeedbackWeights)  # of feedback that decides by itself
    heeding: HeedingWeights = field(default_factory=HeedingWeights)  # of heralds
    rows_least: int = ROWS_LEAST  # of a block, before its values are taken to repeat or not
