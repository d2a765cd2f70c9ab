"""Training techniques, each a few pure functions over the operators."""

from .pipeline import Task, Timeline, pipeline, schedule, simulate
from .rendezvous import export_rendezvous

__all__ = ["Task", "Timeline", "export_rendezvous", "pipeline", "schedule", "simulate"]
