"""Save, resume, export, and pre-emption. Loading a checkpoint executes nothing.

``save`` and ``load`` keep all replicas with everything that they need to resume exactly. ``Preemption`` stops all workers after
the same round when one of them receives a signal. ``export``, ``calibrate`` and ``AveragedReplica`` are for the final model.
"""

from decent_dp.checkpoint.average import AveragedReplica
from decent_dp.checkpoint.exporting import calibrate, export
from decent_dp.checkpoint.preempt import Preemption
from decent_dp.checkpoint.resume import latest, load, read_parameters
from decent_dp.checkpoint.saver import Saving, save

__all__ = ["AveragedReplica", "Preemption", "Saving", "calibrate", "export", "latest", "load", "read_parameters", "save"]
