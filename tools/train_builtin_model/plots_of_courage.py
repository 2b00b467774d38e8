"""Plots about learning, waiting, retrying and courage."""

from tools.train_builtin_model.plot import Plot

DARK = Plot(
    beats=(
        (
            "{They} was afraid of only one thing: the dark.",
            "{They} was never afraid in the day, but at night {they} did not like the dark.",
        ),
        (
            "One evening, there was a big storm. The wind was loud, and all the lights went out.",
            "One night, {hero} woke up and heard a strange sound.",
            "One evening, {hero} was walking home from a friend's house, and it was getting dark.",
        ),
        (
            '"Who is there?" asked {hero}, but nobody answered.',
            "{hero} wanted to hide, and {their} heart beat very fast.",
            '"I am so afraid," said {hero} in a small voice.',
        ),
        (
            'Then {their} {parent} came with {a_colour} lamp. "Look, it is only the wind in the trees," '
            "said {their} {parent}.",
            'Then {hero} saw a small light. It was {their} friend {friend} with {a_colour} lamp! "Come, '
            'take my hand," said {friend}.',
            "{They} took a deep breath and lit {a_colour} lamp. It was only a little {animal} looking for "
            "something to eat.",
        ),
        (
            "{hero} laughed. There was nothing to be afraid of.",
            "Now {hero} felt safe. {They} looked up and saw a thousand stars.",
        ),
        (
            "From that night on, {hero} was not afraid of the dark any more.",
            "{hero} went to bed with a smile and slept until the morning.",
            '"The night is beautiful," said {hero}, and soon {they} was fast asleep.',
        ),
    ),
    questions=(
        ("What was {hero} afraid of?", "{hero} was afraid of the dark."),
        ("What colour was the lamp?", "The lamp was {colour}."),
    ),
)

SWIMMING = Plot(
    beats=(
        (
            "{They} wanted to learn how to {skill}.",
            "All {their} friends could {skill}, but {hero} could not.",
        ),
        (
            '{One_day}, {hero} got up early and said, "Today I will learn to {skill}!"',
            "{One_day}, {hero} tried for the first time.",
        ),
        (
            "It was very hard. {They} tried once, and it did not work. {They} tried two times, and it did "
            "not work.",
            "At first it went wrong, and {hero} was sad. Some of the others laughed.",
            '"I will never learn it," said {hero}, and {they} sat down {spot}.',
        ),
        (
            '"Do not give up," said {their} friend {friend}. "I could not do it at first, too. You must try '
            'every day."',
            '{a_Friend} was watching. "I will teach you," said {friend}. "Go slowly, and do not look down."',
        ),
        (
            "So {hero} tried again the next day, and the day after that. Each day it went a little better.",
            "{hero} tried again and again, and {friend} stayed with {them} all the time.",
        ),
        (
            'Then it worked! "Look at me! I can {skill}!" shouted {hero}. {friend} was very proud of {them}.',
            "After seven days, {hero} could {skill} better than anyone. {They} was the happiest {kind} in "
            "the world.",
            "And one day, {hero} could do it all alone. {Their} {parent} brought {food} for everyone, and "
            "they had a party.",
        ),
    ),
    questions=(
        ("What did {hero} want to learn?", "{hero} wanted to learn how to {skill}."),
        ("Who helped {hero}?", "{friend} helped {hero}."),
    ),
)

RACE = Plot(
    beats=(
        (
            "{They} could not run very fast, but {they} never gave up.",
            "{They} liked to run more than anything else.",
        ),
        (
            "{One_day}, there was a big race {at}. The prize was {a_thing}.",
            '{One_day}, {a_friend} said, "Let us race {to}! The winner gets {a_thing}."',
        ),
        (
            "{hero} and {their} friend {friend} stood side by side. One, two, three, go! {friend} was "
            "faster and soon ran far ahead.",
            "Everyone came to watch. {hero} ran as fast as {they} could, and {their} friend {friend} was "
            "right behind {them}.",
        ),
        (
            "But then {friend} fell over a stone and hurt {f_their} foot.",
            "Suddenly {friend} stopped. {F_their} foot was stuck {spot}.",
        ),
        (
            "{hero} wanted to win, but {they} stopped and helped {friend} to stand up.",
            '"Wait, I will help you," said {hero}. {They} did not think of the prize any more.',
        ),
        (
            "They walked to the end together, hand in hand. Everyone clapped, and they both got the {thing}.",
            'In the end, nobody won the race. "A good friend is the best prize," said {hero}, and {friend} '
            "smiled.",
            "{friend} gave {hero} a hug. The next day, {friend} brought {hero} the {thing} to say thank you.",
        ),
    ),
    questions=(
        ("What was the prize?", "The prize was {a_thing}."),
        ("Who hurt a foot?", "{friend} hurt {f_their} foot."),
        ("Who stopped to help?", "{hero} stopped and helped {friend}."),
    ),
)

SEED = Plot(
    beats=(
        (
            "{They} found a small {colour} seed {at}.",
            "{Their} {parent} gave {them} a small {colour} seed.",
            "{One_day}, {a_friend} gave {hero} a small {colour} seed.",
        ),
        (
            '"What will it be?" asked {hero}. {They} put it in the ground and gave it water.',
            "{hero} made a hole in the ground, put in the seed, and waited.",
        ),
        (
            "The first day, nothing happened. The second day, nothing happened.",
            "{hero} waited for a long time, but there was nothing to see.",
        ),
        (
            '"Maybe it is sleeping," said {hero}, and {they} sang a little song for it.',
            '"Be patient," said {their} {parent}. "Good things take time."',
            "{hero} was sad, but {they} gave it water every day.",
        ),
        (
            "Then, {one_day}, there was a small green leaf! It grew and grew.",
            "Then the rain came, and the sun came, and a little plant looked out of the ground.",
        ),
        (
            "In the summer, it was a tall plant with a big {colour} flower. {hero} showed it to all {their} "
            "friends.",
            "Soon it was a tree full of {fruit}. {hero} gave some {fruit} to everyone, and they were all "
            "happy.",
            "At last, a beautiful {colour} flower opened. {hero} sat beside it every evening and smiled.",
        ),
    ),
    questions=(
        ("What colour was the seed?", "The seed was {colour}."),
        ("What did {hero} put in the ground?", "{hero} put a small {colour} seed in the ground."),
    ),
)

STAR = Plot(
    beats=(
        (
            "Every night {they} looked at the sky and counted the stars.",
            "{They} had one wish: {they} wanted to see a star up close.",
        ),
        (
            "One night, a little {colour} star fell from the sky. It landed {spot} {at}.",
            "One evening, {hero} saw a small {colour} light {spot}. It was a little star!",
        ),
        (
            '"Please help me," said the star. "I want to go home, but I cannot fly."',
            'The star was cold and sad. "I miss the sky," it said.',
        ),
        (
            "{hero} took the star in {their} hands and carried it up the highest hill.",
            "{hero} asked {their} friend {friend}, and together they had an idea. They tied the star to a "
            "big balloon.",
            "{hero} kept the star warm all night and told it a story. Slowly it began to shine again.",
        ),
        (
            'The star rose into the sky. "Thank you, {hero}," it said. "I will never forget you."',
            "Then the wind blew, and the star flew up and up until it was home.",
        ),
        (
            "Since then, one star is brighter than the others, and {hero} knows that it is a friend.",
            "Every night, the star shines for {hero}, and {hero} waves back.",
            "{hero} went home and slept, and a soft {colour} light fell on {their} bed.",
        ),
    ),
    questions=(
        ("What colour was the star?", "The star was {colour}."),
        ("What did {hero} find?", "{hero} found a little star."),
        ("Who helped the star?", "{hero} helped the star."),
    ),
)

PLOTS_OF_COURAGE = (DARK, SWIMMING, RACE, SEED, STAR)
