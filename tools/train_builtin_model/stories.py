"""Stories made from a grammar: one hero, one friend, one thing and one place per story."""

from dataclasses import dataclass
from random import Random

from tools.train_builtin_model import words
from tools.train_builtin_model.plot import OPENINGS
from tools.train_builtin_model.plots_of_courage import PLOTS_OF_COURAGE
from tools.train_builtin_model.plots_of_help import PLOTS_OF_HELP

PLOTS = PLOTS_OF_HELP + PLOTS_OF_COURAGE
SKILLS = ("swim", "sing", "skate", "climb", "dance", "whistle", "jump over the rope")
FRUIT = ("apples", "berries", "cherries", "nuts", "pears", "plums")


def with_article(phrase: str) -> str:
    """`phrase` after "a" or "an"."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def capitalised(text: str) -> str:
    """`phrase` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Being:
    """A character of a story."""

    name: str
    kind: str
    is_girl: bool

    def pronouns(self) -> tuple[str, str, str]:
        """(they, them, their) for this being."""
        return ("she", "her", "her") if self.is_girl else ("he", "him", "his")


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """Text of a story, its characters, and (question, answer) pairs about it."""

    text: str
    hero: Being
    thing: str
    questions: tuple[tuple[str, str], ...]


def make_being(rng: Random, *, kind: str | None = None, name: str | None = None) -> Being:
    """A child or a speaking animal; `kind` and `name` are fixed if set."""
    is_girl = name in words.GIRLS if name else kind == "girl" or (kind != "boy" and rng.random() < 0.5)
    child = "girl" if is_girl else "boy"
    chosen = kind or (child if rng.random() < 0.5 else rng.choice(words.ANIMALS))
    return Being(
        name=name or rng.choice(words.GIRLS if is_girl else words.BOYS), kind=chosen, is_girl=is_girl
    )


def make_friend(rng: Random, hero: Being) -> Being:
    """A friend with another name than the hero and, for animals, of another kind."""
    while True:
        friend = make_being(rng)
        if friend.name != hero.name and (friend.kind != hero.kind or friend.kind in ("girl", "boy")):
            return friend


def _hero_words(rng: Random, hero: Being) -> dict[str, str]:
    they, them, their = hero.pronouns()
    a_kind = with_article(f"{rng.choice(words.TRAITS)} {hero.kind}")
    pronouns = {"they": they, "them": them, "their": their, "They": they.title(), "Their": their.title()}
    return {"hero": hero.name, "kind": hero.kind, "a_kind": a_kind, **pronouns}


def _friend_words(rng: Random, friend: Being) -> dict[str, str]:
    they, them, their = friend.pronouns()
    a_friend = f"{with_article(f'{rng.choice(words.TRAITS)} {friend.kind}')} named {friend.name}"
    pronouns = {
        "f_they": they,
        "f_them": them,
        "f_their": their,
        "F_they": they.title(),
        "F_their": their.title(),
    }
    return {"friend": friend.name, "a_friend": a_friend, "a_Friend": capitalised(a_friend), **pronouns}


def _scene_words(rng: Random, colour: str, toy: str, taken: set[str]) -> dict[str, str]:
    at, to = rng.choice(words.PLACES)
    weather, time = rng.choice(words.WEATHERS), rng.choice(words.TIMES)
    one_day = rng.choice((f"one {weather} {time}", f"one {weather} {time}", "one day"))
    return {
        "at": at,
        "to": to,
        "time": time,
        "one_day": one_day,
        "One_day": capitalised(one_day),
        "colour": colour,
        "a_colour": with_article(colour),
        "noun": toy,
        "thing": f"{colour} {toy}",
        "a_thing": with_article(f"{colour} {toy}"),
        "home": rng.choice(words.HOMES),
        "spot": rng.choice(words.SPOTS),
        "parent": rng.choice(words.PARENTS),
        "food": rng.choice(words.FOODS),
        "fruit": rng.choice(FRUIT),
        "skill": rng.choice(SKILLS),
        "animal": rng.choice([animal for animal in words.SMALL_ANIMALS if animal not in taken]),
    }


def tell_story(
    rng: Random,
    *,
    kind: str | None = None,
    name: str | None = None,
    colour: str | None = None,
    toy: str | None = None,
) -> Story:
    """A story of six beats after its opening, with the hero's kind or name or the thing, if set."""
    hero = make_being(rng, kind=kind, name=name)
    friend = make_friend(rng, hero)
    plot = rng.choice(PLOTS) if toy is None else PLOTS_OF_HELP[0]
    scene = {
        **_hero_words(rng, hero),
        **_friend_words(rng, friend),
        **_scene_words(
            rng, colour or rng.choice(words.COLOURS), toy or rng.choice(words.TOYS), {hero.kind, friend.kind}
        ),
    }
    opening = rng.choice(OPENINGS[:4]) if rng.random() < 0.7 else rng.choice(OPENINGS)
    sentences = [rng.choice(beat) for beat in ((opening,), *plot.beats)]
    questions = (("Who is the story about?", "The story is about {a_kind} named {hero}."), *plot.questions)
    return Story(
        text=" ".join(sentence.format(**scene) for sentence in sentences),
        hero=hero,
        thing=scene["thing"],
        questions=tuple((question.format(**scene), answer.format(**scene)) for question, answer in questions),
    )
