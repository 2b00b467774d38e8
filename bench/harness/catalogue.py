"""All groups of figures, in order of execution."""

from __future__ import annotations

from importlib import import_module

from bench.harness.apart import measured_apart
from bench.harness.group import Group, Measure

GROUPS = (
    Group(
        name="hop",
        about="lap of three mock stages, without compute and beside 2 ms of it : raw grpc.aio ring",
        module="bench.figures.hop",
        about_s=60,
    ),
    Group(
        name="coordinator",
        about="scheduling a step of 256 sequences, without and with frames and results",
        module="bench.figures.coordinator_cost",
        is_apart=True,
        about_s=15,
    ),
    Group(
        name="accounting",
        about="ledger of a step of 256 sequences; sampling : sort",
        module="bench.figures.accounting",
        is_apart=True,
        about_s=20,
    ),
    Group(
        name="pipeline",
        about="steps/s of 2 to 16 mock stages of 20 ms, even or uneven; with steps of any size",
        module="bench.figures.pipeline",
        about_s=130,
    ),
    Group(
        name="pipeline-64",
        about="steps/s of 64 mock stages of 50 ms",
        module="bench.figures.pipeline_64",
        about_s=75,
    ),
    Group(
        name="long-prompt",
        about="time to first token of a prompt of many chunks, mock stages",
        module="bench.figures.long_prompt",
        about_s=15,
    ),
    Group(
        name="clients",
        about="steps/s with 64 and 256 streaming clients, mock stages",
        module="bench.figures.clients",
        about_s=35,
    ),
    Group(
        name="decode",
        about="tokens/s of 1, 8, 16 and 32 streams : matrix products, Hugging Face; timeline",
        module="bench.figures.decode",
        about_s=100,
    ),
    Group(
        name="prefill",
        about="prompt tokens/s of 16 prompts : matrix products, one worker, Hugging Face",
        module="bench.figures.prefill",
        about_s=50,
    ),
    Group(
        name="telemetry",
        about="steps/s of 8 mock stages with every request traced : without telemetry",
        module="bench.figures.telemetry",
        about_s=60,
    ),
    Group(
        name="memory",
        about="resident memory of real workers",
        module="bench.figures.memory",
        about_s=20,
    ),
    Group(
        name="mock-memory",
        about="resident memory of mock workers",
        module="bench.figures.mock_memory",
        about_s=10,
    ),
    Group(
        name="quantized",
        about="tokens/s of one stream and resident memory with int8 and int4 weights : bf16; products alone",
        module="bench.figures.quantized",
        about_s=240,
        is_default=False,
        timeout_s=900.0,
    ),
    Group(
        name="latent",
        about="latent attention of one layer, decoding : products alone, reading its bytes",
        module="bench.figures.latent",
        about_s=30,
        is_default=False,
        is_apart=True,
    ),
    Group(
        name="loading",
        about="loading a stage of 480 M parameters from the page cache : raw reads by as many readers",
        module="bench.figures.loading",
        about_s=60,
        is_default=False,
        is_apart=True,
    ),
    Group(
        name="burst",
        about="bursts of 8, 16 and 32 requests : prefill, then steady decode",
        module="bench.figures.burst",
        about_s=170,
        is_default=False,
        timeout_s=900.0,
    ),
    Group(
        name="arrivals",
        about="latencies and goodput of random arrivals at 70 % of capacity",
        module="bench.figures.arrivals",
        about_s=150,
        is_default=False,
        timeout_s=900.0,
    ),
    Group(
        name="stage-step",
        about="CPU time of a stage for steps of 64 and 256 decodes without compute; --against CHECKOUT",
        module="bench.figures.stage_step",
        about_s=40,
        is_default=False,
        timeout_s=600.0,
    ),
    Group(
        name="lag",
        about="lateness of the coordinator's event loop with 64 text streams; 2,000 streams at once",
        module="bench.figures.lag",
        about_s=50,
        is_default=False,
    ),
    Group(
        name="serve",
        about="processor time of the coordinator per token: 256 streams through Serve : Generate",
        module="bench.figures.serve",
        about_s=60,
        is_default=False,
        timeout_s=400.0,
    ),
    Group(
        name="gateway",
        about="processor time per token of 256 chats through two gateways : Generate; /health p99",
        module="bench.figures.gateway",
        about_s=100,
        is_default=False,
        timeout_s=400.0,
    ),
    Group(
        name="tenants",
        about="guessing prompts by the time to the first token, within a tenant and across",
        module="bench.figures.tenants",
        about_s=150,
        is_default=False,
    ),
    Group(
        name="tenant-waits",
        about="waits of a tenant while another one floods schemas, texts and kept responses : quiet",
        module="bench.figures.tenant_waits",
        about_s=150,
        is_default=False,
        timeout_s=900.0,
    ),
    Group(
        name="tls",
        about="tokens/s of decode and prefill, and bare hops of 1 MiB, with TLS : plain",
        module="bench.figures.tls",
        about_s=110,
        is_default=False,
        timeout_s=400.0,
    ),
    Group(
        name="big-frames",
        about="16 MiB of hidden states per hop : raw TCP; event loop of the receiving stage",
        module="bench.figures.big_frames",
        about_s=30,
        is_default=False,
    ),
    Group(
        name="same-host",
        about="hops of 8 KiB to 16 MiB in shared memory : between hosts",
        module="bench.figures.same_host",
        about_s=60,
        is_default=False,
    ),
    Group(
        name="peers",
        about="bursts of 1, 8 and 16 requests : another engine; --vllm-python or --openai-url",
        module="bench.figures.peers",
        about_s=240,
        is_default=False,
        timeout_s=1200.0,
    ),
)


def chosen(names: list[str]) -> list[Group]:
    """Groups by name, in the order of GROUPS; the default run without names. Raises ValueError."""
    known = {group.name: group for group in GROUPS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: no such figures; there are {', '.join(known)}")
    return [group for group in GROUPS if (group.name in names if names else group.is_default)]


def measure_of(group: Group) -> Measure:
    """The group's `measure` function, or one that runs it in a child process."""
    if group.is_apart:
        return measured_apart(group.module)
    measure: Measure = import_module(group.module).measure
    return measure
