"""The Python client of a coordinator, for threads that block.

Generated from `Client` by tools/sync_client.py; do not edit.
"""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from stageline.client.blocking import BlockingCalls
from stageline.client.client import Client
from stageline.client.output import Completion, GenerateOutput
from stageline.client.request import ChatMessage, GenerateOptions, Prompt
from stageline_rpc.v1 import cluster_pb2, inference_pb2, kv_events_pb2, telemetry_pb2


class SyncClient(BlockingCalls[Client]):
    """Client of the coordinator at `address` (HOST:PORT), for threads that block.

        with SyncClient("127.0.0.1:7480") as client:
            for output in client.generate("Once upon a time", max_tokens=100):
                print(output.text, end="", flush=True)

    It has the methods of `Client`. Threads can share a client, and their calls are concurrent; a running
    event loop does not matter. The client opens at its first call, waits up to `connect_timeout_s` for the
    coordinator, and closes at the end of `with`, by `close`, or when it is collected. Detached requests
    survive outages of up to `reattach_timeout_s`. In a process that was forked after the first call of any
    client, calls raise RuntimeError.
    """

    def __init__(
        self,
        address: str,
        *,
        tls_dir: Path | str | None = None,
        connect_timeout_s: float = 5.0,
        reattach_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(
            Client(
                address,
                tls_dir=tls_dir,
                connect_timeout_s=connect_timeout_s,
                reattach_timeout_s=reattach_timeout_s,
            )
        )

    def generate(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[GenerateOutput, None, None]:
        """Generate completions of a text, token ids, or a conversation; yield outputs as they arrive.

        Keywords are fields of `GenerateOptions`; omitted ones, and None, have the server's default. Invalid
        types raise InvalidRequest immediately. Inside an OpenTelemetry span, the request's trace continues
        that span.

        Leaving the loop, closing the generator, interrupting the thread or losing the connection cancels the
        request on the server. With `on_disconnect="detach"` (or `Detach(keep_s=...)`) the request
        continues: `attach` reads it, `cancel` ends it, and the client reattaches after a lost connection,
        delivering each output exactly once. (Other clients need the `attach_secret` for both.) Raises
        Unavailable when the coordinator is unreachable for `reattach_timeout_s`, or has lost the request.
        """
        return self._iterate(self._asynchronous.generate(prompt, **options))

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Return the outputs of `generate` as one complete `Completion` per choice."""
        return self._run(self._asynchronous.complete(prompt, **options))

    def attach(
        self,
        request_id: str,
        *,
        secret: str | None = None,
        from_token: int = 0,
        positions: Mapping[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> Generator[GenerateOutput, None, None]:
        """Yield the outputs of a request from token `from_token` on, or, per choice, from `positions`.

        The call that read them before ends with `Superseded`, and `timeout_s` replaces its timeout.
        Reattaches after a lost connection, like `generate`. `secret` is the request's `attach_secret`,
        which the client keeps for its own requests. Raises RequestNotFound when the request is not live
        and its output is not kept, PermissionDenied for a wrong secret.
        """
        return self._iterate(
            self._asynchronous.attach(
                request_id, secret=secret, from_token=from_token, positions=positions, timeout_s=timeout_s
            )
        )

    def cancel(self, request_id: str, *, secret: str | None = None, token: str | None = None) -> None:
        """Cancel a live request (its `generate` raises `Cancelled`), or drop the output of an ended one.

        `secret` is as in `attach`; the operator `token` cancels any request. Raises RequestNotFound or
        PermissionDenied.
        """
        return self._run(self._asynchronous.cancel(request_id, secret=secret, token=token))

    def tokenize(self, prompt: str | Sequence[ChatMessage]) -> list[int]:
        """Return the token ids that `generate` would compute for a text or a conversation.

        Raises InvalidRequest for a model without tokenizer or chat template, and for a text that can never
        fit into the model.
        """
        return self._run(self._asynchronous.tokenize(prompt))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Raises InvalidRequest for an id outside the vocabulary."""
        return self._run(self._asynchronous.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    def model(self) -> inference_pb2.GetModelResponse:
        """Return the served model and its limits."""
        return self._run(self._asynchronous.model())

    def drain(self, worker: str, *, token: str | None = None) -> None:
        """Drain a worker with the operator `token`, or an operator's certificate; return when it has left.

        Raises WorkerNotFound or PermissionDenied.
        """
        return self._run(self._asynchronous.drain(worker, token=token))

    def activity(self, *, after_step: int = 0, since_us: int = 0) -> telemetry_pb2.GetActivityResponse:
        """Recent activity without steps up to `after_step` and seconds before `since_us`."""
        return self._run(self._asynchronous.activity(after_step=after_step, since_us=since_us))

    def status(self) -> cluster_pb2.GetStatusResponse:
        """Return the current plan, workers, memory, KV use and requests."""
        return self._run(self._asynchronous.status())

    def kv_events(
        self, *, with_token_ids: bool = False
    ) -> Generator[kv_events_pb2.KvSnapshot | kv_events_pb2.KvEvent, None, None]:
        """Yield what is in the KV cache: a `KvSnapshot`, then each change as a `KvEvent`, without gaps.

        Another `KvSnapshot` follows whenever the subscription was renewed, after a lost connection, a
        restart of the coordinator, or more than 4,096 unread changes: it replaces all that is known, and
        the changes before it are not sent. Its `next_event_id` minus the one expected is the number of
        missed events; a smaller one is from a restarted coordinator. Raises Unavailable when the
        coordinator is unreachable for `reattach_timeout_s`: until then, what is known may be out of date.
        """
        return self._iterate(self._asynchronous.kv_events(with_token_ids=with_token_ids))

    def traces(self, max_traces: int | None = None) -> telemetry_pb2.ListTracesResponse:
        """List requests with kept traces, newest first (default: all), page by page."""
        return self._run(self._asynchronous.traces(max_traces))

    def trace(self, request_id: str) -> telemetry_pb2.GetTraceResponse:
        """All spans of a request, by its id, an end of it, or trace id. Raises RequestNotFound,
        InvalidRequest.
        """
        return self._run(self._asynchronous.trace(request_id))
