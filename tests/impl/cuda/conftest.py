"""Says where the kernels run: on the host, and with ``-m gpu`` on a device."""

from __future__ import annotations

import pytest
import torch

from impl.cuda.kernels import Kernels
from impl.cuda.launch import Launch, on_device
from tests.cuda_on_cpu.host import Host
from tests.impl.codecs.properties import Backend, Run


class Device(Run):
    """Runs launches on a GPU, where the order of threads cannot be chosen."""

    def __call__(self, launch: Launch, device: torch.device) -> None:
        self.ran.append(launch.kernel)
        on_device(launch, device)


PLACES = [
    pytest.param("host", marks=pytest.mark.needs("g++", "x86-64")),
    pytest.param("device", marks=[pytest.mark.gpu, pytest.mark.needs("CuPy")]),
]


@pytest.fixture(scope="session", params=PLACES)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "host":
        host = Host(request.getfixturevalue("cuda_libraries"))
        return Backend(Kernels(host, spread=2), host, torch.device("cpu"))  # threads loop in small rows too
    device = Device()
    return Backend(Kernels(device), device, torch.device("cuda", torch.cuda.current_device()))
