"""Plots about helping, finding and sharing."""

from tools.train_builtin_model.plot import Plot

LOST = Plot(
    beats=(
        (
            "{They} had {a_thing} and took it everywhere.",
            "{Their} favourite thing was {a_thing}.",
            "{Their} {parent} had given {them} {a_thing}, and {they} loved it.",
        ),
        (
            "{One_day}, {hero} went {to} with the {noun}. When {they} wanted to go home, the {noun} was "
            "gone!",
            "{One_day}, {hero} was playing {at}. Suddenly {they} could not find the {noun}.",
            "{One_day}, a strong wind came {at} and carried the {noun} away.",
        ),
        (
            '{hero} looked everywhere and began to cry. "Where is my {noun}?" {they} said.',
            "{hero} felt very sad. {They} looked here and there, but {they} could not see it.",
            '"Oh no! My {noun} is lost," said {hero}.',
        ),
        (
            'Then {a_friend} came by. "I will help you," said {friend}. '
            "They searched together for a long time.",
            '{a_Friend} heard {them}. "Do not be sad," said {friend}. "We can look for it together."',
            'Just then, {hero} met {a_friend}. "Did you see {a_thing}?" asked {hero}. "No," said {friend}, '
            '"but I can help you look."',
        ),
        (
            "At last, {friend} saw something {colour} {spot}. It was the {noun}!",
            "They looked {spot}, and there was the {thing}!",
            'In the end, {hero} looked {spot}. "Here it is!" {they} shouted.',
        ),
        (
            '"Thank you, {friend}," said {hero}. From that day on, they were best friends.',
            "{hero} was so happy that {they} hugged {friend}. Then they played together until the sun went "
            "down.",
            "{hero} thanked {friend}, and they walked home together. {hero} never lost the {noun} again.",
        ),
    ),
    questions=(
        ("What did {hero} lose?", "{hero} lost {a_thing}."),
        ("Where was the {noun}?", "The {noun} was {spot}."),
        ("Who helped {hero}?", "{friend} helped {hero}."),
        ("What colour was the {noun}?", "The {noun} was {colour}."),
    ),
)

RESCUE = Plot(
    beats=(
        (
            "{They} loved to walk {at} and look at the flowers.",
            "{They} liked animals very much.",
            "Every day {they} went {to} to play.",
        ),
        (
            "{One_day}, {hero} heard a small sound {at}. {They} looked {spot} and found a little {animal}.",
            "{One_day}, {hero} saw a little {animal} {spot}. It was cold and hungry.",
            "{One_day}, {hero} was {at} when {they} found a little {animal} {spot}.",
        ),
        (
            '"Are you all right?" asked {hero}. The {animal} shook its head. It had a hurt leg.',
            'The {animal} was lost and afraid. "Do not worry," said {hero}. "I will take care of you."',
            "The {animal} could not find its mother. It looked up at {hero} with big eyes.",
        ),
        (
            "{hero} carried the {animal} home. {Their} {parent} made a soft bed in a {colour} box.",
            "{hero} gave it some {food} and a warm {colour} blanket.",
            "{hero} put the {animal} in a {colour} basket and gave it some water and some {food}.",
        ),
        (
            "Day by day, the {animal} grew strong again.",
            "After a few days, the {animal} felt much better and began to play.",
            "Soon the {animal} was not afraid any more.",
        ),
        (
            "Then {hero} took it back {to}, and its mother was waiting there. {hero} waved goodbye with a "
            "big smile.",
            "The {animal} stayed with {hero}, and they were happy together.",
            '"You have a good heart," said {their} {parent}. {hero} felt very proud that night.',
        ),
    ),
    questions=(
        ("What did {hero} find?", "{hero} found a little {animal}."),
        ("Where was the {animal}?", "The {animal} was {spot}."),
        ("Who helped the {animal}?", "{hero} helped the {animal}."),
    ),
)

SHARING = Plot(
    beats=(
        (
            "{They} loved {food} more than anything else.",
            "{Their} {parent} made the best {food} in the world.",
        ),
        (
            "{One_day}, {hero} took a {colour} basket full of {food} and went {to}.",
            "{One_day}, {hero} sat down {at} to eat some {food}.",
        ),
        (
            "There {they} met {a_friend}. {friend} looked hungry and sad.",
            "{a_Friend} was sitting {spot}. {F_they} had nothing to eat.",
        ),
        (
            "{hero} wanted to keep all the {food}. But then {they} thought of {friend}.",
            '"Why are you sad?" asked {hero}. "I have not eaten today," said {friend}.',
            '"That smells good," said {friend} in a small voice.',
        ),
        (
            '"You can have half of my {food}," said {hero}. {friend} smiled a big smile.',
            '"Please sit with me," said {hero}. "There is enough for two." They ate the {food} together.',
            "So {hero} gave half of the {food} to {friend}, and they ate and laughed.",
        ),
        (
            'The next day, {friend} came back with {a_thing}. "This is for you," {f_they} said. {hero} was '
            "very happy.",
            "The {food} tasted even better that day, because {hero} had a new friend.",
            "When the sun went down, they were full and happy. {hero} learned that it is good to share.",
        ),
    ),
    questions=(
        ("What did {hero} share?", "{hero} shared some {food} with {friend}."),
        ("Who was hungry?", "{friend} was hungry."),
        ("Where did they meet?", "They met {at}."),
    ),
)

BAKING = Plot(
    beats=(
        (
            "{Their} friend {friend} had a birthday soon.",
            "{They} wanted to make a surprise for {their} friend {friend}.",
            "{They} liked to cook with {their} {parent}, and {their} friend {friend} had a birthday soon.",
        ),
        (
            '{One_day}, {hero} said, "I will make a big cake for {friend}!"',
            "{One_day}, {hero} went into the kitchen to bake a cake for {friend}.",
        ),
        (
            "{They} took eggs, milk, flour and some {fruit}. But there was no sugar left.",
            "{They} mixed eggs and milk in a {colour} bowl. Then the bowl fell down, and everything was on "
            "the floor!",
            "{They} put the cake in the oven and went out to play. When {they} came back, the cake was "
            "black!",
        ),
        (
            '"What can I do now?" said {hero}. {Their} {parent} smiled and said, "We can try again '
            'together."',
            'A tear ran down {their} face. "Do not cry," said {their} {parent}. "I will help you."',
        ),
        (
            "They worked all {time}. This time the cake was soft and sweet, with {fruit} on the top.",
            "{hero} stirred slowly, and {their} {parent} watched the oven. Soon the whole house smelled of "
            "warm cake.",
        ),
        (
            '{hero} took the cake to {friend}. "This is the best cake I ever had!" said {friend}.',
            "{friend} was so surprised that {f_they} danced around the table. Everyone had a piece of cake.",
            "{friend} ate two big pieces and thanked {hero}. {hero} went to bed tired and happy.",
        ),
    ),
    questions=(
        ("What did {hero} make?", "{hero} made a cake for {friend}."),
        ("Who was the cake for?", "The cake was for {friend}."),
        ("Who helped {hero}?", "{Their} {parent} helped {them}."),
    ),
)

STUCK = Plot(
    beats=(
        (
            "{They} had a new {colour} kite.",
            "{They} got a {colour} kite from {their} {parent}.",
        ),
        (
            "{One_day}, {hero} ran {to} with the kite. It flew high up into the sky.",
            "{One_day}, {hero} and {their} {parent} took the kite {to}. The wind was strong.",
        ),
        (
            "But then the kite flew into a tall tree and stayed there.",
            "Suddenly the wind turned, and the kite was stuck in a tree.",
        ),
        (
            "{hero} jumped and jumped, but {they} was too small.",
            "{hero} pulled at the string, but the kite did not move.",
            '{hero} threw a stick at the kite, but it did not help. "The tree is too tall," {they} said.',
        ),
        (
            '{a_Friend} was sitting in the tree. "I can get it for you," said {friend}, and {f_they} '
            "climbed to the top.",
            'Then {a_friend} came along with a long ladder. "Let me try," said {friend}.',
            '{a_Friend} saw what had happened. "Stand on my back," said {friend}. "Then we are tall enough!"',
        ),
        (
            "Soon the kite was free. {hero} and {friend} flew it together until the stars came out.",
            '"Hooray!" shouted {hero}. {They} gave {friend} some {food} to say thank you.',
            '"You are a good friend," said {hero}. After that, they flew the {colour} kite together every '
            "day.",
        ),
    ),
    questions=(
        ("What was stuck in the tree?", "The {colour} kite was stuck in the tree."),
        ("Who helped {hero}?", "{friend} helped {hero}."),
        ("What colour was the kite?", "The kite was {colour}."),
    ),
)

PLOTS_OF_HELP = (LOST, RESCUE, SHARING, BAKING, STUCK)
