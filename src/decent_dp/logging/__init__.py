"""Looking at a run: curves for TensorBoard, and the status of every worker for ``decent-dp watch``."""

from decent_dp.logging.publisher import publish
from decent_dp.logging.recorder import Recorder

__all__ = ["Recorder", "publish"]
