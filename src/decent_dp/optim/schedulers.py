"""Learning rate schedules."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["lr_scheduler_fn_cosine_with_warmup"]


class CosineWithWarmup(LRScheduler):
    """The schedule of `lr_scheduler_fn_cosine_with_warmup`, in closed form: the rate depends on the step alone."""

    def __init__(self, optimizer: Optimizer, t_max: int, t_warmup: int, cosine_eta_min: float, warmup_decay: float) -> None:
        if not 0 < t_max < math.inf:
            raise ValueError(f"t_max must be > 0 and finite, but is {t_max}")
        for name, value in (("t_warmup", t_warmup), ("cosine_eta_min", cosine_eta_min)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, but is {value}")
        if not 0 <= warmup_decay <= 1:
            raise ValueError(f"warmup_decay must be in [0, 1], but is {warmup_decay}")
        self.t_max, self.t_warmup = t_max, t_warmup
        self.cosine_eta_min, self.warmup_decay = cosine_eta_min, warmup_decay
        super().__init__(optimizer)  # sets the rates of step 0

    def _rate(self, lr: float) -> float:
        """The rate at step ``self.last_epoch`` for a group whose full rate is ``lr``."""
        t = self.last_epoch
        if t < self.t_warmup:
            return lr * (self.warmup_decay + (1 - self.warmup_decay) * t / self.t_warmup)
        progress = min((t - self.t_warmup) / self.t_max, 1.0)  # 1: the end, where it stays
        return self.cosine_eta_min + (lr - self.cosine_eta_min) * (1 + math.cos(math.pi * progress)) / 2

    def get_lr(self) -> list[Any]:
        return [self._rate(float(lr)) for lr in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from the saved step, rates included: torch leaves the optimizer at the rate of step 0 if the optimizer's
        state was loaded before the scheduler was made.

        Raises:
            ValueError: the state has another number of param groups.
        """
        groups = self.optimizer.param_groups
        if len(state_dict["base_lrs"]) != len(groups):
            raise ValueError(
                f"the scheduler's state has {len(state_dict['base_lrs'])} param groups, but the optimizer has {len(groups)}"
            )
        super().load_state_dict(state_dict)
        for group, lr in zip(groups, self.get_last_lr(), strict=True):
            if hasattr(group["lr"], "fill_"):  # the user may hold this tensor: keep it
                group["lr"].fill_(lr)
            else:
                group["lr"] = float(lr)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: Optimizer,
    t_max: int,
    t_warmup: int,
    cosine_eta_min: float = 1e-6,
    warmup_decay: float = 0.01,
) -> LRScheduler:
    """Linear warm-up, then cosine decay; t_warmup + t_max steps in all, and constant after them.

    lr is the rate of each param group when the schedule is made; the rate of step t (from 0) is

        lr · (warmup_decay + (1 - warmup_decay) · t / t_warmup)                            t < t_warmup
        η + (lr - η) · (1 + cos(π · (t - t_warmup) / t_max)) / 2,   η = cosine_eta_min     up to t = t_warmup + t_max
        η                                                                                  afterwards

    Args:
        optimizer: its rates are set; each param group keeps its own lr.
        t_max: steps of the cosine, which begin after the warm-up; > 0.
        t_warmup: steps of the warm-up; 0 for none.
        cosine_eta_min: the last rate, η, the same for all groups.
        warmup_decay: the first rate as a fraction of lr, in [0, 1].

    Returns:
        A scheduler that must be stepped once after each update; it can be pickled, saved and loaded.

    Raises:
        ValueError: an argument is out of its range.
    """
    return CosineWithWarmup(optimizer, t_max, t_warmup, cosine_eta_min, warmup_decay)
