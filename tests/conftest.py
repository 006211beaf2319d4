from __future__ import annotations

import pytest
import torch

from tests.workers import Workers

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers() -> Workers:
    return Workers()
