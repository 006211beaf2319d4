"""Optimizers, their factories for named parameters, and schedules. Needs torch alone."""

from __future__ import annotations

from .accum import AccumAdam, AccumAdamW, accum_adam_foreach, accum_adamw_foreach
from .factories import optim_fn_accum_adam, optim_fn_accum_adamw, optim_fn_adam, optim_fn_adamw
from .gossip_adamw import GossipAdamW
from .schedulers import lr_scheduler_fn_cosine_with_warmup

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "GossipAdamW",
    "accum_adam_foreach",
    "accum_adamw_foreach",
    "lr_scheduler_fn_cosine_with_warmup",
    "optim_fn_accum_adam",
    "optim_fn_accum_adamw",
    "optim_fn_adam",
    "optim_fn_adamw",
]
