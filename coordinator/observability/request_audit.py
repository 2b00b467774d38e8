"""Audit records of accepted and ended requests."""

import hashlib

from coordinator.observability.facts import FactObserver, Outcome, RequestRecord
from wire.audit import Action, AuditLog, AuditOutcome
from wire.channels import AUTHORIZATION_KEY
from wire.errors import reason_of
from wire.ids import id_text

_OUTCOMES = {
    Outcome.FINISHED: AuditOutcome.OK,
    Outcome.CANCELLED: AuditOutcome.OK,
    Outcome.FAILED: AuditOutcome.FAILED,
}
_CREDENTIALS = (AUTHORIZATION_KEY, "x-api-key", "api-key", "cookie")


class RequestAudit(FactObserver):
    """Records who made a request, its tokens and its end; nothing of its prompt and output."""

    def __init__(self, audit: AuditLog, client_key: str | None) -> None:
        """Clients that a credential identifies, the value of `client_key`, are recorded by its hash."""
        self._audit = audit
        self._hides_clients = client_key in _CREDENTIALS

    def request_accepted(self, record: RequestRecord) -> None:
        self._record(Action.REQUEST_ACCEPTED, AuditOutcome.OK, record)

    def request_ended(self, record: RequestRecord) -> None:
        error, outcome = record.error, Outcome.of(record.error)
        choices = record.request.choices
        self._record(
            Action.REQUEST_ENDED,
            _OUTCOMES[outcome],
            record,
            completion_tokens=sum(len(choice.sequence.generated_tokens) for choice in choices),
            status=outcome.value,
            reason=None if error is None else reason_of(error),
        )

    def _record(
        self, action: Action, outcome: AuditOutcome, record: RequestRecord, **facts: str | int | None
    ) -> None:
        request = record.request
        self._audit.record(
            action,
            outcome,
            who=f"client {self._name(request.client)}",
            request_id=id_text(request.id),
            prompt_tokens=request.num_prompt_tokens,
            choices=len(request.choices),
            host="",
            **facts,
        )

    def _name(self, client: str) -> str:
        if not self._hides_clients:
            return client
        return f"sha256:{hashlib.sha256(client.encode()).hexdigest()[:16]}"
