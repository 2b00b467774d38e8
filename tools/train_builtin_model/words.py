"""The words that stories and conversations choose from."""

GIRLS = (
    "Lily", "Anna", "Mia", "Rosa", "Emma", "Nora", "Lucy", "Clara", "Ella", "Ruby", "Grace", "Zoe", "Maya",
    "Ivy", "Alice", "Hanna", "Sara", "Daisy", "Jane", "Kate",
)  # fmt: skip
BOYS = (
    "Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Finn", "Oscar", "Theo", "Hugo", "Noah", "Adam", "Paul",
    "Milo", "Felix", "Henry", "Tim", "Peter", "Luke", "David",
)  # fmt: skip
ANIMALS = (
    "cat", "dog", "rabbit", "fox", "bear", "mouse", "duck", "frog", "pony", "owl", "squirrel", "hedgehog",
    "turtle", "lamb", "kitten", "puppy", "goat", "pig", "bird", "lion", "dragon", "elephant", "monkey",
    "horse",
)  # fmt: skip
SMALL_ANIMALS = (
    "bird",
    "mouse",
    "duckling",
    "kitten",
    "hedgehog",
    "rabbit",
    "frog",
    "puppy",
    "turtle",
    "squirrel",
)
TRAITS = (
    "little",
    "kind",
    "clever",
    "brave",
    "happy",
    "curious",
    "shy",
    "cheerful",
    "quiet",
    "young",
    "gentle",
)
COLOURS = (
    "red", "blue", "green", "yellow", "orange", "purple", "white", "black", "pink", "brown", "golden",
    "silver",
)  # fmt: skip
TOYS = (
    "ball",
    "kite",
    "drum",
    "doll",
    "boat",
    "train",
    "hat",
    "scarf",
    "bell",
    "book",
    "balloon",
    "rope",
    "cup",
)
HOMES = (
    "in a small house", "near a big forest", "in a little town", "on a quiet farm", "at the top of a hill",
    "in a village by the sea", "at the end of a long road", "next to a river", "in a house with a blue door",
)  # fmt: skip
PLACES = (
    ("in the park", "to the park"), ("by the river", "to the river"), ("in the forest", "to the forest"),
    ("at the beach", "to the beach"), ("in the garden", "to the garden"), ("on the hill", "to the hill"),
    ("at the market", "to the market"), ("in the meadow", "to the meadow"), ("by the pond", "to the pond"),
    ("at the old bridge", "to the old bridge"),
)  # fmt: skip
SPOTS = (
    "under a bush", "behind a tree", "in the tall grass", "under a bench", "behind a big rock",
    "next to a log", "under some leaves", "between two stones",
)  # fmt: skip
PARENTS = ("mother", "father", "grandmother", "grandfather")
FOODS = (
    "apples",
    "cookies",
    "berries",
    "bread",
    "soup",
    "pancakes",
    "cake",
    "honey",
    "nuts",
    "cherries",
    "cheese",
)
WEATHERS = ("sunny", "warm", "windy", "cloudy", "cold", "bright", "quiet", "rainy")
TIMES = ("morning", "day", "afternoon", "evening")
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

COLOUR_FACTS = {
    "the sky": ("is", "blue"), "grass": ("is", "green"), "snow": ("is", "white"),
    "a banana": ("is", "yellow"), "the sun": ("is", "yellow"), "a lemon": ("is", "yellow"),
    "milk": ("is", "white"), "a frog": ("is", "green"), "a cherry": ("is", "red"), "a tomato": ("is", "red"),
    "the night": ("is", "black"), "the sea": ("is", "blue"), "a pig": ("is", "pink"),
    "a bear": ("is", "brown"), "a carrot": ("is", "orange"), "chocolate": ("is", "brown"),
    "leaves": ("are", "green"), "strawberries": ("are", "red"), "clouds": ("are", "white"),
    "plums": ("are", "purple"),
}  # fmt: skip
SOUNDS = {
    "cow": "moo", "cat": "meow", "dog": "woof", "duck": "quack", "sheep": "baa", "pig": "oink", "bee": "buzz",
    "owl": "hoo", "frog": "ribbit", "mouse": "squeak", "lion": "roar", "horse": "neigh",
}  # fmt: skip
LEGS = {
    "cat": 4, "dog": 4, "cow": 4, "horse": 4, "frog": 4, "bear": 4, "bird": 2, "duck": 2, "hen": 2, "owl": 2,
    "bee": 6, "ant": 6, "spider": 8, "fish": 0, "snake": 0,
}  # fmt: skip
DIETS = {
    "rabbit": "carrots and grass", "cat": "fish and meat", "cow": "grass", "squirrel": "nuts",
    "mouse": "cheese and seeds", "bird": "seeds and worms", "bear": "berries, fish and honey",
    "horse": "grass and hay", "frog": "flies", "lion": "meat",
}  # fmt: skip
DWELLINGS = {
    "fish": "in the water", "bird": "in a nest", "bear": "in a cave", "bee": "in a hive", "fox": "in a den",
    "rabbit": "in a hole in the ground", "cow": "on a farm", "frog": "by a pond", "squirrel": "in a tree",
    "lion": "in a warm, wide land",
}  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("happy", "sad"), ("day", "night"), ("up", "down"), ("fast", "slow"),
    ("old", "young"), ("open", "closed"), ("loud", "quiet"), ("wet", "dry"), ("long", "short"),
    ("good", "bad"), ("light", "dark"), ("full", "empty"), ("left", "right"), ("yes", "no"), ("in", "out"),
    ("soft", "hard"),
)  # fmt: skip
WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
