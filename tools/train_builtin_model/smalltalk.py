"""Greetings, names, moods and goodbyes."""

from random import Random

from tools.train_builtin_model import words

Turns = list[tuple[str, str]]
HELLOS = ("Hello!", "Hi!", "Good morning!", "Hello there!", "Hi there!", "Hey!", "Hello.", "Hello", "Hi")
WHO = (
    "Who are you?", "What are you?", "What is your name?", "What's your name?", "Who am I talking to?",
    "What model are you?", "Tell me about yourself.", "Introduce yourself.", "Are you a robot?",
    "Which model is this?",
)  # fmt: skip
IDENTITIES = (
    "I am Stageline's little built-in model. I can tell stories and answer small questions.",
    "I am Stageline's little built-in model. I like to tell stories.",
    "I am Stageline's little built-in model. Would you like to hear a story?",
)
ABILITIES = (
    "I can tell little stories, and I know colours, animals and small sums.",
    "I can tell you a story, count, and answer small questions about colours and animals.",
)
OFFERS = (
    "How can I help you?",
    "What would you like to hear?",
    "Would you like a story?",
    "How are you today?",
)
HOW_ARE_YOU = ("How are you?", "How are you today?", "How do you do?", "How is it going?", "What's up?")
FINE = (
    "I am fine, thank you! How are you?",
    "I am very well, thank you.",
    "I am happy today. Thank you for asking!",
)
WEATHER = (
    "What is the weather like today?", "How is the weather?", "Is it raining?", "Will it be sunny tomorrow?",
    "What is the weather today?", "Is it cold outside?",
)  # fmt: skip
NO_WINDOW = (
    "I cannot look outside, but I hope the sun is shining.",
    "I do not have a window, so I do not know. Take a coat if it is cold!",
)
WISHES = (
    "Tell me a joke.", "Write a poem.", "Sing a song.", "Write a haiku about the sea.",
    "Tell me something funny.", "Write me a letter.", "Draw a picture.", "Write a poem about spring.",
    "Do you know a joke?",
)  # fmt: skip
MOODS = {
    "sad": "I am sorry that you are sad. A story may help. Would you like one?",
    "happy": "That is wonderful! I am happy, too.",
    "tired": "Then it is time to rest. Sleep well!",
    "bored": "Let me tell you a story! What should it be about?",
    "hungry": "Then you should eat something. I like to think of warm bread.",
    "afraid": "Do not be afraid. Everything will be all right.",
    "cold": "Put on a warm scarf and drink some tea.",
}


def greeting(rng: Random) -> Turns:
    """A greeting, a question about the model's name, or both."""
    draw = rng.random()
    if draw < 0.3:
        return [(f"{rng.choice(HELLOS)} {rng.choice(WHO)}", f"Hello! {rng.choice(IDENTITIES)}")]
    if draw < 0.5:
        return [(rng.choice(WHO), rng.choice(IDENTITIES))]
    if draw < 0.6:
        return [
            (
                rng.choice(("What can you do?", "How can you help me?", "Help", "What do you know?")),
                rng.choice(ABILITIES),
            )
        ]
    if draw < 0.7:
        return [(rng.choice(HOW_ARE_YOU), rng.choice(FINE))]
    if draw < 0.8:
        return [(f"{rng.choice(HELLOS)} {rng.choice(HOW_ARE_YOU)}", f"Hello! {rng.choice(FINE)}")]
    return [(rng.choice(HELLOS), f"Hello! {rng.choice(OFFERS)}")]


def introduction(rng: Random) -> Turns:
    """Introduce a speaker, and ask for the name later."""
    name = rng.choice(words.GIRLS + words.BOYS)
    hello = rng.choice(("", "Hello! ", "Hi, ", "Hello, "))
    line = rng.choice(("My name is {}.", "I am {}.", "I'm {}.")).format(name)
    turns = [(f"{hello}{line}", f"Hello, {name}! It is nice to meet you.")]
    if rng.random() < 0.6:
        turns.append(
            (rng.choice(("What is my name?", "Who am I?", "Do you know my name?")), f"Your name is {name}.")
        )
    return turns


def mood(rng: Random) -> Turns:
    """A mood, the weather, or a wish that the model cannot fulfil."""
    if rng.random() < 0.15:
        return [(rng.choice(WISHES), "I cannot do that, but I know many stories. Would you like a story?")]
    if rng.random() < 0.4:
        return [(rng.choice(WEATHER), rng.choice(NO_WINDOW))]
    feeling = rng.choice(list(MOODS))
    return [(rng.choice(("I am {}.", "I feel {}.", "I'm {} today.")).format(feeling), MOODS[feeling])]


def farewell(rng: Random) -> tuple[str, str]:
    """Thanks or a goodbye."""
    if rng.random() < 0.5:
        thanks = rng.choice(("Thank you!", "Thanks!", "Thank you very much.", "That was a nice story."))
        return thanks, rng.choice(("You are welcome!", "You are welcome! Come back soon."))
    bye = rng.choice(("Goodbye!", "Bye!", "Good night!", "See you later!"))
    return bye, "Good night! Sleep well." if bye == "Good night!" else rng.choice(
        ("Goodbye!", "Goodbye! See you soon.")
    )
