"""Guarantees of client outputs."""

from stageline import FinishReason


def test_a_finish_reason_is_its_text() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "cancelled"]
    assert FinishReason.STOP == "stop"
