"""Single questions with one right answer: colours, animals, numbers, opposites, days and story actors."""

from collections.abc import Callable
from random import Random

from tools.train_builtin_model import words
from tools.train_builtin_model.stories import capitalised, with_article

Turn = tuple[str, str]


def colour(rng: Random) -> Turn:
    thing, (verb, answer) = rng.choice(list(words.COLOUR_FACTS.items()))
    spelling = rng.choice(("colour", "colour", "color"))
    return f"What {spelling} {verb} {thing}?", f"{capitalised(thing)} {verb} {answer}."


def sound(rng: Random) -> Turn:
    animal, says = rng.choice(list(words.SOUNDS.items()))
    question = rng.choice(("What does {} say?", "What sound does {} make?"))
    return question.format(with_article(animal)), f"{capitalised(with_article(animal))} says {says}."


def legs(rng: Random) -> Turn:
    animal, num_legs = rng.choice(list(words.LEGS.items()))
    number = "no" if num_legs == 0 else words.NUMBERS[num_legs]
    return (
        f"How many legs does {with_article(animal)} have?",
        f"{capitalised(with_article(animal))} has {number} legs.",
    )


def diet(rng: Random) -> Turn:
    animal, food = rng.choice(list(words.DIETS.items()))
    return f"What does {with_article(animal)} eat?", f"{capitalised(with_article(animal))} eats {food}."


def dwelling(rng: Random) -> Turn:
    animal, home = rng.choice(list(words.DWELLINGS.items()))
    return f"Where does {with_article(animal)} live?", f"{capitalised(with_article(animal))} lives {home}."


def total(rng: Random) -> Turn:
    """A sum of two numbers up to ten, in digits or words as the question has them."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.2:
        in_words = f"{words.NUMBERS[a]} plus {words.NUMBERS[b]}"
        return f"What is {in_words}?", f"{capitalised(in_words)} is {words.NUMBERS[a + b]}."
    question = rng.choice(
        (
            "What is {} plus {}?",
            "What is {} + {}?",
            "{} + {} = ?",
            "How much is {} plus {}?",
            "What is {}+{}?",
        )
    )
    return question.format(a, b), f"{a} plus {b} is {a + b}."


def difference(rng: Random) -> Turn:
    """The difference of two numbers up to ten, at least zero."""
    b, a = sorted((rng.randint(0, 10), rng.randint(0, 10)))
    question = rng.choice(("What is {} minus {}?", "What is {} - {}?", "How much is {} minus {}?"))
    return question.format(a, b), f"{a} minus {b} is {a - b}."


def counting(rng: Random) -> Turn:
    """Counting to a number, or the next number."""
    last = rng.randint(3, 12)
    if rng.random() < 0.4:
        return f"What comes after {last}?", f"After {last} comes {last + 1}."
    if rng.random() < 0.5:
        return f"Count to {words.NUMBERS[last]}.", f"{capitalised(', '.join(words.NUMBERS[1 : last + 1]))}."
    return f"Count to {last}.", f"{', '.join(str(number) for number in range(1, last + 1))}."


def opposite(rng: Random) -> Turn:
    """The opposite of a word."""
    word, other = rng.choice(words.OPPOSITES)
    if rng.random() < 0.5:
        word, other = other, word
    return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."


def weekday(rng: Random) -> Turn:
    """The day after a day."""
    day = rng.randrange(7)
    return (
        f"What day comes after {words.WEEK[day]}?",
        f"After {words.WEEK[day]} comes {words.WEEK[(day + 1) % 7]}.",
    )


def who_did_what(rng: Random) -> Turn:
    """Two people, two things, and a question about one of them."""
    names = rng.sample(words.GIRLS + words.BOYS, k=2)
    things = [with_article(f"{rng.choice(words.COLOURS)} {toy}") for toy in rng.sample(words.TOYS, k=2)]
    told = " ".join(f"{name} has {thing}." for name, thing in zip(names, things, strict=True))
    which = rng.randrange(2)
    answer = f"{names[which]} has {things[which]}."
    question = f"Who has {things[which]}?" if rng.random() < 0.5 else f"What does {names[which]} have?"
    return f"{told} {question}", answer


FACTS: tuple[Callable[[Random], Turn], ...] = (
    colour, colour, sound, legs, diet, dwelling, total, total, total, difference, counting, opposite, weekday,
    who_did_what,
)  # fmt: skip
