"""What the tests share: a small cohort whose domains differ, and the real data where it is present."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from feddar.data.cohort import Cohort
from feddar.simulation.processes import declare_own_process
from helpers.cohorts import make_cohort

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; what tests start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Of the other threads here, those of the test runner, none holds a lock that a forked child needs.
declare_own_process()
settings.register_profile("no deadline", deadline=None)  # machines may be busy
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    folder = Path(os.environ.get("FEDDAR_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent (set FEDDAR_DATA)")
    return folder


@pytest.fixture
def cohort() -> Cohort:
    return make_cohort()
