"""Training techniques, each a few pure functions over the operators."""

from .pipeline import pipeline
from .rendezvous import export_rendezvous
from .schedules import Task, Timeline, schedule, simulate

__all__ = ["Task", "Timeline", "export_rendezvous", "pipeline", "schedule", "simulate"]
