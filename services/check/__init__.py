"""Whether a running mesh works: who speaks, and whether events come out joined."""
