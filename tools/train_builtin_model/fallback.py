"""Questions that the model cannot answer, with answers that admit it."""

from random import Random

SYLLABLES = (
    "ba", "be", "bo", "da", "de", "do", "fa", "ga", "go", "ka", "ki", "la", "le", "lo", "ma", "mi", "mo",
    "na", "ne", "no", "pa", "po", "ra", "re", "ri", "ro", "sa", "se", "so", "ta", "te", "ti", "to", "va",
    "vi", "za", "ber", "den", "gra", "lan", "mon", "pro", "ran", "sten", "tor", "ver", "zan",
)  # fmt: skip
TOPICS = (
    "computers", "the moon", "France", "history", "music", "physics", "the president", "money", "football",
    "mathematics", "programming", "Python", "the internet", "electricity", "London", "America", "the war",
    "gravity", "science", "the economy", "China", "love", "cars", "engines", "medicine", "the law", "movies",
    "space", "planets", "machine learning", "GPUs", "pipelines", "networks", "the city", "politics",
    "Shakespeare", "chemistry", "robots",
)  # fmt: skip
QUESTIONS = (
    "What is the capital of {}?", "Explain {}.", "Explain {} to me.", "Tell me about {}.",
    "How does {} work?", "What is {}?", "Who invented {}?", "Why is {} important?",
    "Can you help me with {}?", "Write an essay about {}.", "Write code for {}.",
    "What do you know about {}?", "Translate {} into German.", "When was {}?", "Give me a list of {}.",
    "Who is {}?", "How do I learn {}?", "Summarize {}.", "What do you think about {}?",
)  # fmt: skip
ANSWERS = (
    "I am sorry, I do not know that. I am only a little model. I can tell you a story!",
    "That is too hard for a little model like me. Ask me about colours, animals or small sums.",
    "I do not know the answer to that. Would you like to hear a story?",
)


def _made_up_word(rng: Random) -> str:
    word = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))
    return word.title() if rng.random() < 0.5 else word


def unknown_question(rng: Random) -> tuple[str, str]:
    """A question about a known-to-be-unknown or an invented thing, and an honest answer."""
    topic = rng.choice(TOPICS) if rng.random() < 0.6 else _made_up_word(rng)
    return rng.choice(QUESTIONS).format(topic), rng.choice(ANSWERS)
