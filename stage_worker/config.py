"""Configuration of a stage worker."""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

from stage_worker.backends.contract import CudaGraphs, KernelChoice
from stage_worker.backends.mock_spec import MockSpec
from telemetry.logs import DEFAULT_LOGS, LogSettings
from telemetry.service_manager import UNSUPERVISED, NotifySettings
from telemetry.settings import NO_SETTINGS, TelemetrySettings
from wire.addresses import DEFAULT_ADDRESS, Address, parse_address, parse_peer_address
from wire.device_rates import DeviceRates, RateSource, parse_rate, rate_text
from wire.flags import (
    OFF,
    Flag,
    check_limits,
    checkpoint_directory,
    directory_path,
    file_path,
    listen_address,
    listen_address_or_off,
    peer_address,
)
from wire.payloads import MIN_PAYLOAD_BYTES
from wire.sizes import exact_size, parse_size
from wire.tensors import WireDType, parse_wire_dtype, wire_dtype_name
from wire.transport import PLAIN_SETTINGS, TransportSettings

MAX_THREADS_PER_CPU = 8


class SameHost(Enum):
    """Whether hidden states travel in shared memory between workers of one host: AUTO where possible."""

    AUTO = "auto"
    OFF = "off"


DEFAULT_ENROLL_PORT = 7483
_WILDCARDS = ("0.0.0.0", "::")
_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def parse_cpu_set(text: str) -> tuple[int, ...]:
    """The CPUs of a list such as 0-3,8, in order. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.split(","):
        found = _PART.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ValueError(f"CPU set {text!r} is not a list of numbers and ranges such as 0-3,8")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def check_cpu_set(cpus: tuple[int, ...]) -> None:
    """Raises ValueError, with the numbers, for CPUs that this process may not run on or that do not exist."""
    allowed = os.sched_getaffinity(0)
    missing = [cpu for cpu in cpus if cpu not in allowed]
    if missing or not cpus:
        raise ValueError(
            f"CPUs {_listed(missing)} are not among those this process may use: {_listed(allowed)}"
        )


def check_threads(num_threads: int) -> None:
    """Raises ValueError above MAX_THREADS_PER_CPU for each CPU of this host; too many crash the process."""
    num_cpus = os.cpu_count() or 1
    limit = MAX_THREADS_PER_CPU * num_cpus
    if num_threads > limit:
        raise ValueError(
            f"--threads is {num_threads}, the limit is {limit}: {MAX_THREADS_PER_CPU} per CPU, "
            f"and this host has {num_cpus} CPUs"
        )


def pin_to(cpus: tuple[int, ...]) -> None:
    """Keeps this thread, and all that it starts from here on, on `cpus`."""
    os.sched_setaffinity(0, cpus)


def _listed(cpus: Collection[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


AUTO = "auto"
"""The device of a worker that takes a free GPU."""
ALL_GPUS = "cuda:all"
"""The device of a process that runs one worker per GPU of its host."""
_DEVICE = re.compile(rf"cpu|{AUTO}|{ALL_GPUS}|cuda(:\d{{1,3}})?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


class MemoryTooLarge(ValueError):
    """`memory_bytes` is more than the device has."""


_cluster = partial(Flag, panel="Cluster and addresses")
_certificates = partial(Flag, panel="Certificates")
_compute = partial(Flag, panel="Compute")
_weights = partial(Flag, panel="Weights of remote models")
WEIGHTS_FOLDER = "weights-of-workers"
"""In the user's cache directory: a cache of weights for each worker of this host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Settings of a stage worker, with the flags that set them. Raises ValueError with the numbers.

    A mock stage has neither model nor device nor threads.
    """

    coordinator: Annotated[
        str, _cluster("--coordinator", "HOST:PORT", "Coordinator address", parse=peer_address)
    ] = DEFAULT_ADDRESS
    name: Annotated[
        str | None,
        _cluster(
            "--name", "NAME", "Stable name, unique in the cluster, e.g. gpu-a", unset="from host and device"
        ),
    ] = None
    listen: Annotated[
        str | None,
        _cluster(
            "--listen",
            "ADDR:PORT",
            "Listen address",
            unset="a free port of the address that reaches the coordinator",
            parse=listen_address,
        ),
    ] = None
    advertise: Annotated[
        str | None,
        _cluster(
            "--advertise",
            "HOST:PORT",
            "Address at which others reach this worker",
            unset="the listen address",
            parse=peer_address,
        ),
    ] = None
    reflection: Annotated[
        bool, _cluster("--reflection", None, "Describe the gRPC services to clients that ask")
    ] = True
    health_listen: Annotated[
        str | None,
        _cluster(
            "--health-listen",
            "HOST:PORT",
            "Plain HTTP address of /healthz and /readyz, for probes without certificates",
            unset="none",
            parse=listen_address,
        ),
    ] = None
    payload_listen: Annotated[
        str | None,
        _cluster(
            "--payload-listen",
            "ADDR:PORT|off",
            "Listen address for large hidden states of the previous stage; off: they travel over gRPC",
            unset="a free port of the listen address",
            parse=listen_address_or_off,
        ),
    ] = None
    payload_advertise: Annotated[
        str | None,
        _cluster(
            "--payload-advertise",
            "HOST:PORT",
            "Address at which the previous stage reaches the payload listen address",
            unset="the payload listen address",
            parse=peer_address,
        ),
    ] = None
    min_payload_bytes: Annotated[
        int,
        _cluster(
            "--payload-min",
            "SIZE",
            "Smallest hidden states sent to the next stage's payload listen address, or left on a GPU for it",
            min=1,
            parse=parse_size,
            format=exact_size,
        ),
    ] = MIN_PAYLOAD_BYTES
    same_host: Annotated[
        SameHost,
        _cluster(
            "--same-host",
            None,
            "Hidden states to and from stages on the same host travel in shared memory where possible; off: "
            "as between hosts",
        ),
    ] = SameHost.AUTO
    wire_dtype: Annotated[
        WireDType | None,
        _cluster(
            "--wire-dtype",
            "bf16|fp8|int8",
            "Dtype of hidden states sent to the next stage",
            unset="the coordinator's choice",
            parse=parse_wire_dtype,
            format=wire_dtype_name,
        ),
    ] = None

    join_token_file: Annotated[
        Path | None,
        _certificates(
            "--join-token-file",
            "FILE",
            "File of mode 0600 with a join token, for a certificate in --tls-dir or the state directory, "
            "which is renewed while the worker runs",
            unset="none",
            parse=file_path,
        ),
    ] = None
    enroll: Annotated[
        str | None,
        _certificates(
            "--enroll",
            "HOST:PORT",
            "The coordinator's --enroll-listen address",
            unset=f"the coordinator's host, port {DEFAULT_ENROLL_PORT}",
            parse=peer_address,
        ),
    ] = None

    device: Annotated[
        str,
        _compute(
            "--device",
            "DEVICE",
            "cpu, cuda or cuda:N; auto: a free GPU; cuda:all: one worker per GPU, named NAME-0, NAME-1, ...",
        ),
    ] = "cpu"
    memory_bytes: Annotated[
        int | None,
        _compute(
            "--memory",
            "SIZE",
            "Memory for weights, KV cache and activations together, e.g. 20GiB",
            unset="90 % of free GPU memory, half of free host memory",
            min=1,
            parse=parse_size,
            format=exact_size,
        ),
    ] = None
    warm_spare_bytes: Annotated[
        int | None,
        _compute(
            "--warm-spare",
            "SIZE",
            "Memory of the host, on a CPU a part of --memory, in which a worker without a stage keeps the "
            "layers that it would get if another worker were lost",
            unset="none is kept",
            min=1,
            parse=parse_size,
            format=exact_size,
        ),
    ] = None
    model_directory: Annotated[
        Path | None,
        _compute(
            "--model",
            "DIR|FILE",
            "The checkpoint's directory, or its GGUF file, on this host",
            unset="the coordinator's path",
            parse=checkpoint_directory,
        ),
    ] = None
    num_threads: Annotated[
        int | None, _compute("--threads", "N", "Compute threads per worker", unset="one per core", min=1)
    ] = None
    cpu_set: Annotated[
        tuple[int, ...] | None,
        _compute(
            "--cpu-set",
            "LIST",
            "CPUs to run on, e.g. 0-3,8",
            unset="all",
            parse=parse_cpu_set,
            format=_listed,
        ),
    ] = None
    kernels: Annotated[
        KernelChoice,
        _compute(
            "--kernels",
            None,
            "Functions that compute a stage: the fastest available, torch's operators only, or compiled "
            "kernels only, which need bf16 and a CPU with AVX-512, or a GPU and triton",
        ),
    ] = KernelChoice.AUTO
    device_rate: Annotated[
        RateSource | DeviceRates,
        _compute(
            "--device-rate",
            "RATE",
            "Speed of the device, by which layers are shared if all workers tell one: measure, none, "
            "GB/s:TFLOP/s as in 3350:800, or auto, which measures GPUs",
            parse=parse_rate,
            format=rate_text,
        ),
    ] = RateSource.AUTO
    cuda_graphs: Annotated[
        CudaGraphs,
        _compute(
            "--cuda-graphs",
            None,
            "Whether a worker on a GPU launches the layers of a step at once, as a CUDA graph; needs Triton "
            "kernels and a model without experts",
        ),
    ] = CudaGraphs.AUTO
    step_timeout_s: Annotated[
        float,
        _compute(
            "--step-timeout",
            "SECONDS",
            "Time that a step may compute after the coordinator has given it up; then the process exits with "
            "code 3",
            above=0,
        ),
    ] = 30.0
    mock: Annotated[
        MockSpec | None,
        _compute(
            "--mock",
            "TIMES",
            "Simulate step times, as in step=20ms,token=0.05ms; context= is per token and 1,000 tokens of "
            "context; poison_after=N, hang_after=N and oom_at=N simulate device faults",
            parse=MockSpec.parse,
        ),
    ] = None
    weights_directory: Annotated[
        Path | None,
        _weights(
            "--cache-dir",
            "DIR",
            "Cache of fetched weights, for one worker; with cuda:all, of a folder per worker",
            unset="a folder of the user's cache directory for --name, or else for the device",
            parse=directory_path,
        ),
    ] = None
    weights_limit_bytes: Annotated[
        int | None,
        _weights(
            "--cache-size",
            "SIZE",
            "Maximum size of the cache on the disk; layers that were not used for longest are evicted",
            unset="the disk's",
            min=1,
            parse=parse_size,
            format=exact_size,
        ),
    ] = None
    weights_listen: Annotated[
        str | None,
        _weights(
            "--weights-listen",
            "ADDR:PORT|off",
            "Listen address for workers that fetch weights which this one has; with an address, the weights "
            "of --model and of the coordinator's path are served too",
            unset="a free port of the listen address, once weights were fetched",
            parse=listen_address_or_off,
        ),
    ] = None
    weights_advertise: Annotated[
        str | None,
        _weights(
            "--weights-advertise",
            "HOST:PORT",
            "Address at which other workers reach the weights listen address",
            unset="the weights listen address",
            parse=peer_address,
        ),
    ] = None
    cache_directory: Path | None = None
    """The user's cache directory, for hashes of weights and for weights; None disables both."""
    state_directory: Path | None = None
    """Directory for a certificate without --tls-dir."""
    transport: TransportSettings = PLAIN_SETTINGS
    telemetry: TelemetrySettings = NO_SETTINGS
    notify: NotifySettings = UNSUPERVISED
    logs: LogSettings = DEFAULT_LOGS

    def __post_init__(self) -> None:
        parse_peer_address(self.coordinator)
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device {self.device!r} is not one of cpu, auto, cuda, cuda:0, ..., cuda:all")
        check_limits(self)
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} is not 1 to 63 letters, digits, '.', '_' or '-'")
        if self.listen is not None:
            self._check_listen("--listen", self.listen)
        self._check_payloads()
        if self.advertise is not None:
            parse_peer_address(self.advertise)
        if self.mock is not None:
            self._check_mock()
        if self.model_directory is not None and self._fetch_flags:
            raise ValueError(
                f"--model is a directory, from which nothing is fetched: it cannot be used with "
                f"{' and '.join(self._fetch_flags)}"
            )
        if self.num_threads is not None:
            check_threads(self.num_threads)
        if self.cpu_set is not None:
            check_cpu_set(self.cpu_set)

    @property
    def _fetch_flags(self) -> list[str]:
        """The given flags of fetched weights."""
        given = {"--cache-dir": self.weights_directory, "--cache-size": self.weights_limit_bytes}
        return [flag for flag, value in given.items() if value is not None]

    def weights_cache(self, device: str) -> Path | None:
        """Directory of fetched weights of a worker on `device`; None without the user's cache directory."""
        if self.weights_directory is not None or self.cache_directory is None:
            return self.weights_directory
        return self.cache_directory / WEIGHTS_FOLDER / (self.name or device.replace(":", "-"))

    @property
    def compute_threads(self) -> int | None:
        """Threads of torch inside one operation; None for torch's own choice."""
        if self.num_threads is None and self.cpu_set is not None:
            return len(self.cpu_set)
        return self.num_threads

    @property
    def enroll_address(self) -> str:
        """HOST:PORT of the coordinator's enrolment."""
        return self.enroll or str(Address(parse_peer_address(self.coordinator).host, DEFAULT_ENROLL_PORT))

    @property
    def asked_hosts(self) -> tuple[str, ...]:
        """Hosts at which others reach this worker, beside the address that the coordinator sees."""
        addresses = (
            *(self.advertise, self.payload_advertise, self.weights_advertise),
            *(self.listen, self.payload_listen, self.weights_listen),
        )
        hosts = [parse_address(address).host for address in addresses if address not in (None, OFF)]
        return tuple(dict.fromkeys(host for host in hosts if host not in _WILDCARDS))

    def _check_listen(self, flag: str, address: str) -> None:
        """A certificate is there before it listens, with a join token."""
        if self.join_token_file is None:
            self.transport.check_listen(flag, address)

    def _check_payloads(self) -> None:
        if self.payload_listen not in (None, OFF):
            self._check_listen("--payload-listen", self.payload_listen)
        self._check_weights()
        if self.payload_advertise is not None:
            parse_peer_address(self.payload_advertise)
            if self.payload_listen == OFF:
                raise ValueError("--payload-advertise needs a payload port: --payload-listen is off")

    def _check_weights(self) -> None:
        if self.weights_listen not in (None, OFF):
            self._check_listen("--weights-listen", self.weights_listen)
        if self.weights_advertise is not None:
            parse_peer_address(self.weights_advertise)
            if self.weights_listen == OFF:
                raise ValueError("--weights-advertise needs a weights port: --weights-listen is off")

    def _check_mock(self) -> None:
        given = [
            flag
            for flag, is_given in (
                ("--model", self.model_directory is not None),
                ("--device", self.device != "cpu"),
                ("--threads", self.num_threads is not None),
                ("--cpu-set", self.cpu_set is not None),
                ("--kernels", self.kernels is not KernelChoice.AUTO),
                ("--warm-spare", self.warm_spare_bytes is not None),
                ("--device-rate measure", self.device_rate is RateSource.MEASURE),
                ("--cuda-graphs", self.cuda_graphs is not CudaGraphs.AUTO),
                ("--weights-listen", self.weights_listen not in (None, OFF)),
                ("--weights-advertise", self.weights_advertise is not None),
            )
            if is_given
        ] + self._fetch_flags
        if given:
            raise ValueError(f"mocks compute nothing: --mock cannot be used with {' and '.join(given)}")
