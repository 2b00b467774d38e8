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
    """Words of the plots' sentences, with every word that can fill a placeholder."""
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


def test_documents_are_a_function_of_the_seed() -> None:
    first = list(islice(documents(7), 50))
    assert first == list(islice(documents(7), 50))
    assert first != list(islice(documents(8), 50))


def test_stories_contain_only_words_of_the_grammar() -> None:
    rng = Random(1)
    story_words = words_of(" ".join(tell_story(rng).text for _ in range(NUM_STORIES)))
    assert story_words <= grammar_words()


def test_stories_differ_from_each_other() -> None:
    rng = Random(2)
    assert len({tell_story(rng).text for _ in range(NUM_STORIES)}) == NUM_STORIES


def test_pronouns_match_the_gender_of_the_characters() -> None:
    rng = Random(3)
    girls, boys = words_of(" ".join(words.GIRLS)), words_of(" ".join(words.BOYS))
    num_checked = 0
    for _ in range(NUM_STORIES):
        story = words_of(tell_story(rng).text)
        if not story & boys:
            assert not story & {"he", "him", "his"}
            num_checked += 1
        if not story & girls:
            assert not story & {"she", "her"}
            num_checked += 1
    assert num_checked > NUM_STORIES / 4


def test_a_story_is_about_the_requested_subject() -> None:
    story = tell_story(Random(4), kind="fox", name="Rosa", colour="orange", toy="kite")
    assert (story.hero.name, story.hero.kind, story.hero.is_girl) == ("Rosa", "fox", True)
    assert "fox" in words_of(story.text)
    assert "an orange kite" in story.text


def test_names_colours_and_animals_in_answers_occur_in_the_story() -> None:
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
