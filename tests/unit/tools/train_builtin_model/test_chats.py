import re
from random import Random

from tools.train_builtin_model import words
from tools.train_builtin_model.chats import make_conversation
from tools.train_builtin_model.facts import FACTS, counting, difference, total, who_did_what
from tools.train_builtin_model.fallback import unknown_question


def test_conversations_alternate_between_user_and_assistant() -> None:
    rng = Random(1)
    for _ in range(300):
        roles = [message["role"] for message in make_conversation(rng) if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles


def test_no_message_is_empty_or_has_an_unfilled_placeholder() -> None:
    rng = Random(2)
    for _ in range(300):
        for message in make_conversation(rng):
            assert message["content"].strip()
            assert not set("{}<>|") & set(message["content"])


def test_sums_and_differences_are_right() -> None:
    rng = Random(3)
    for _ in range(200):
        for sign, (_, answer) in ((1, total(rng)), (-1, difference(rng))):
            if digits := re.findall(r"\d+", answer):
                a, b, result = map(int, digits)
                assert a + sign * b == result


def test_sums_in_words_are_right() -> None:
    rng = Random(4)
    answers = [answer for _, answer in (total(rng) for _ in range(200)) if not re.search(r"\d", answer)]
    assert answers
    for answer in answers:
        a, b, result = (
            words.NUMBERS.index(word) for word in re.sub("plus|is", "", answer.lower())[:-1].split()
        )
        assert a + b == result


def test_counting_goes_up_by_one_from_one() -> None:
    rng = Random(5)
    for _ in range(100):
        question, answer = counting(rng)
        if question.startswith("Count to") and answer[0].isdigit():
            assert [int(number) for number in re.findall(r"\d+", answer)] == list(
                range(1, answer.count(",") + 2)
            )


def test_story_questions_are_answered_from_the_story() -> None:
    rng = Random(6)
    for _ in range(100):
        question, answer = who_did_what(rng)
        assert answer in question


def test_every_fact_is_a_question_with_a_sentence_as_answer() -> None:
    rng = Random(7)
    for fact in FACTS:
        _, answer = fact(rng)
        assert answer.endswith(".")


def test_unknown_facts_are_answered_as_unknown() -> None:
    rng = Random(8)
    for _ in range(50):
        _, answer = unknown_question(rng)
        assert "not know" in answer or "too hard" in answer
