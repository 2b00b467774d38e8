import re
from itertools import islice
from random import Random

from tools.train_builtin_model import words
from tools.train_builtin_model.corpus import documents
from tools.train_builtin_model.plot import OPENINGS
from tools.train_builtin_model.stories import FRUIT, PLOTS, SKILLS, tell_story

NUM_STORIES = 400


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def grammar_words() -> set[str]:
    """Every word of the plots' sentences, without the names in braces, and every word that may fill those."""
    sentences = [*OPENINGS, *(sentence for plot in PLOTS for beat in plot.beats for sentence in beat)]
    fixed = words_of(" ".join(re.sub(r"{\w+}", " ", sentence) for sentence in sentences))
    lists = (
        words.GIRLS,
        words.BOYS,
        words.ANIMALS,
        words.SMALL_ANIMALS,
        words.TRAITS,
        words.COLOURS,
        words.TOYS,
    )
    more = (words.HOMES, words.SPOTS, words.PARENTS, words.FOODS, words.WEATHERS, words.TIMES, FRUIT, SKILLS)
    chosen = words_of(" ".join(word for group in (*lists, *more) for word in group))
    places = words_of(" ".join(word for place in words.PLACES for word in place))
    return fixed | chosen | places | words_of("a an one named girl boy he him his she her friend")


def test_same_seed_gives_same_documents_and_another_seed_gives_others() -> None:
    first = list(islice(documents(7), 50))
    assert first == list(islice(documents(7), 50))
    assert first != list(islice(documents(8), 50))


def test_stories_are_made_only_of_the_grammar() -> None:
    rng = Random(1)
    told = words_of(" ".join(tell_story(rng).text for _ in range(NUM_STORIES)))
    assert told <= grammar_words()


def test_stories_differ_from_each_other() -> None:
    rng = Random(2)
    assert len({tell_story(rng).text for _ in range(NUM_STORIES)}) == NUM_STORIES


def test_a_story_among_girls_never_says_he_and_one_among_boys_never_says_she() -> None:
    rng = Random(3)
    girls, boys = words_of(" ".join(words.GIRLS)), words_of(" ".join(words.BOYS))
    num_checked = 0
    for _ in range(NUM_STORIES):
        told = words_of(tell_story(rng).text)
        if not told & boys:
            assert not told & {"he", "him", "his"}
            num_checked += 1
        if not told & girls:
            assert not told & {"she", "her"}
            num_checked += 1
    assert num_checked > NUM_STORIES / 4


def test_a_story_is_about_the_requested_subject() -> None:
    story = tell_story(Random(4), kind="fox", name="Rosa", colour="orange", toy="kite")
    assert (story.hero.name, story.hero.kind, story.hero.is_girl) == ("Rosa", "fox", True)
    assert "fox" in words_of(story.text)
    assert "an orange kite" in story.text


def test_names_colours_and_animals_in_answers_come_from_the_story() -> None:
    rng = Random(5)
    telling = words_of(
        " ".join((*words.GIRLS, *words.BOYS, *words.COLOURS, *words.ANIMALS, *words.SMALL_ANIMALS))
    )
    num_told = 0
    for _ in range(NUM_STORIES):
        story = tell_story(rng)
        for _, answer in story.questions:
            assert words_of(answer) & telling <= words_of(story.text)
            num_told += len(words_of(answer) & telling)
    assert num_told > NUM_STORIES
