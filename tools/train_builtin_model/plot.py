"""A story plot: beats with alternative sentences, and questions about them."""

from dataclasses import dataclass

Beat = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Beats between a story's opening and its end, with (question, answer) pairs."""

    beats: tuple[Beat, ...]
    questions: tuple[tuple[str, str], ...]


OPENINGS: Beat = (
    "Once upon a time, there was {a_kind} named {hero}. {They} lived {home}.",
    "Once upon a time, there was {a_kind} named {hero} who lived {home}.",
    "Once upon a time, {a_kind} named {hero} lived {home}.",
    "Once upon a time, {home}, there lived {a_kind}. {Their} name was {hero}.",
    "Once upon a time there was {a_kind} called {hero}.",
    "Once there was {a_kind} named {hero}. {They} lived {home} with {their} {parent}.",
    "{hero} was {a_kind} who lived {home}.",
    "There once was {a_kind} named {hero}. {They} lived {home}.",
)
