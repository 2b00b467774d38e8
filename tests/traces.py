"""Traces as a collector has them: whose child is whose, and what must hold of every one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from telemetry.spans import HTTP_SPANS, SPANS, Attr, SpanName
from tests.otlp_collector import CollectedSpan

ATTRIBUTES: dict[str, set[str]] = {spec.name: set(spec.attributes) for spec in SPANS}
WORK = {SpanName.STAGE_PREFILL: SpanName.PREFILL_CHUNK, SpanName.STAGE_DECODE: SpanName.DECODE}


@dataclass(frozen=True, slots=True)
class Tree:
    """All spans of one trace; the root is its request's."""

    spans: tuple[CollectedSpan, ...]

    @classmethod
    def of(cls, spans: Iterable[CollectedSpan], trace_id: str) -> Tree:
        return cls(tuple(span for span in spans if span.span.trace_id.hex() == trace_id))

    @property
    def root(self) -> CollectedSpan:
        (root,) = self.named(SpanName.GENERATE)
        return root

    @property
    def gateway(self) -> CollectedSpan | None:
        """The HTTP request above the root, if there is one."""
        return next(iter(self.named(*HTTP_SPANS)), None)

    def named(self, *names: SpanName) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name in names]

    def children(self, parent: CollectedSpan) -> list[CollectedSpan]:
        return [span for span in self.spans if span.span.parent_span_id == parent.span.span_id]

    def check_connected(self) -> None:
        """Every span but the root has a parent here, stages lie below the right work, no id comes twice."""
        for span in self.spans:
            unknown = set(span.attributes) - ATTRIBUTES[span.name]
            assert not unknown, f"{span.name} has {unknown}, which the table lacks"
        by_id = {span.span.span_id: span for span in self.spans}
        assert len(by_id) == len(self.spans), "a span came twice"
        for span in self.spans:
            if span is self.gateway:
                assert self.root.span.parent_span_id == span.span.span_id
                continue
            if span is self.root:
                continue
            parent = by_id.get(span.span.parent_span_id)
            assert parent is not None, f"{span.name} of {span.process} has no parent"
            assert parent.name == WORK.get(SpanName(span.name), SpanName.GENERATE)

    def check_nested(self, *, slack_us: float) -> None:
        """Every child lies inside its parent, but for `slack_us`: times of one clock have microseconds."""
        for parent in self.spans:
            for child in self.children(parent):
                where = f"{child.name} of {child.process} in {parent.name}"
                early_us = (parent.span.start_time_unix_nano - child.span.start_time_unix_nano) / 1000
                late_us = (child.span.end_time_unix_nano - parent.span.end_time_unix_nano) / 1000
                assert early_us <= slack_us, f"{where} begins {early_us:.0f} us early"
                assert late_us <= slack_us, f"{where} ends {late_us:.0f} us late"

    def unexplained_share(self, work: CollectedSpan) -> float:
        """By which part of what the coordinator observed of a chunk's or a decode's steps the times of stages
        and hops, added up, are off.
        """
        parts = work.attributes[Attr.RESULT_DURATION]
        for stage in self.children(work):
            for part in (Attr.HOP_DURATION, Attr.RECEIVE_DURATION, Attr.WAIT_DURATION, Attr.COMPUTE_DURATION):
                parts += stage.attributes[part]
        observed: float = work.attributes[Attr.STEP_DURATION]
        return abs(parts - observed) / observed

    @property
    def most_unexplained_share(self) -> float:
        """Of all chunks and decodes."""
        work = self.named(SpanName.PREFILL_CHUNK, SpanName.DECODE)
        return max(self.unexplained_share(span) for span in work)

    @property
    def num_generated(self) -> int:
        """Tokens in the spans: one for each finished prefill, and the tokens of decode work."""
        decodes = self.named(SpanName.DECODE)
        return len(decodes) + sum(decode.attributes[Attr.TOKENS] for decode in decodes)


def check_explained(trees: Sequence[Tree]) -> None:
    """Stages and hops explain the time of every chunk and of the decodes, of one request at least.

    That a process waits for a core between two readings of its clock happens to some requests, while a
    missing part lacks in all.
    """
    shares = [tree.most_unexplained_share for tree in trees]
    assert min(shares) < 0.05, f"unexplained shares of requests: {shares}"
