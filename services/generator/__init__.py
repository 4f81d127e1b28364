"""Sample events for any mesh file: reproducible for a seed, joinable because equal columns draw from one domain of
keys."""

from services.generator.generate import Generated, GeneratedStream, generate
from services.generator.workload import Workload

__all__ = ["Generated", "GeneratedStream", "Workload", "generate"]
