"""An example of a reward function, in a file of its own: happier stories are better.

A run uses it by `--config.reward.function=happy_stories.py:reward`. The function is called with the
step's prompts and responses (strings, one entry per sequence) and, by name, every column of the
dataset and `prompt_tokens` and `response_tokens`. It returns one number per sequence, or None for
one that it cannot score. Copy this file and write your own.

The score is between 0 and 1. Different happy words raise it and sad ones lower it ("not happy" is
sad). A repeated word earns nothing, and stories that repeat themselves, list feelings or stop after
a few words are penalised. Ordinary story continuations of 50 tokens get 0.3 to 0.5.
"""

import math
import re

_HAPPY = set(
    """
    amazing beautiful best better brave bright celebrate celebrated cheer cheered cheerful clap
    clapped cozy cuddle cuddled dance danced dancing delicious delighted enjoy enjoyed enjoying
    excited exciting favorite friend friends friendly fun funny gift giggle giggled glad good
    great grin grinned happier happily happiness happy helped helpful helping hooray hug hugged
    hugs joy joyful jumping kind kindness kiss kissed laugh laughed laughing laughs like liked
    love loved lovely loves loving lucky magic magical nice party peaceful perfect play played
    playing pleased pretty proud safe share shared sharing shiny sing singing smile smiled smiles
    smiling special sun sunny sunshine surprise sweet thank thanked thankful together treat treats
    warm welcome won wonderful yay yummy
    """.split()
)
_SAD = set(
    """
    afraid alone angry annoyed ashamed awful bad bite bleed break broke broken bully cried cries
    cruel cry crying dangerous dark dead die died dirty disappointed fell fight fighting fought
    frightened frustrated grumpy hate hated horrible hungry hurt jealous kill lonely lose lost mad
    mean miserable naughty nervous pain poor regret sad sadly sadness scare scared scary scream
    screamed selfish shouted sick sorry stuck terrible tired ugly unhappy upset worried worry
    worse wrong yelled
    """.split()
)
_NEGATIONS = {"not", "no", "never", "didn't", "don't", "wasn't", "isn't", "couldn't", "can't"}


def reward(prompts, responses, **columns):
    """Happiness of each response, 0 to 1."""
    return [happiness(response) for response in responses]


def happiness(story: str) -> float:
    """Happiness of one story, 0 to 1."""
    words = re.findall(r"[a-z]+(?:'[a-z]+)?", story.lower())
    if not words:
        return 0.0
    happy, sad = set(), set()
    for before, word in zip(["", *words], words):
        if word in _SAD or (word in _HAPPY and before in _NEGATIONS):
            sad.add(word)
        elif word in _HAPPY:
            happy.add(word)
    mood = 1 / (1 + math.exp(1.0 - 0.5 * len(happy) + 0.7 * len(sad)))
    # A third of the words may be happy ones; above that it is a list and not a story.
    listing = max(0.0, len(happy) / len(words) - 1 / 3)
    # Repeated bigrams: ordinary text of this length has few of them.
    pairs = list(zip(words, words[1:]))
    repeated = 1 - len(set(pairs)) / max(len(pairs), 1)
    return mood * min(1.0, len(words) / 12) * math.exp(-3 * listing - 3 * max(0.0, repeated - 0.1))
