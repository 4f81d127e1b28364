"""Faults on a running mesh, and the proof that they changed nothing."""
