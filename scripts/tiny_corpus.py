"""The corpus of the tiny pair: facts put into templates, from one seed; all of it is made here.

Plain texts and ChatML: stories, sums, counting, lists, code, edits, and characters that take several byte tokens each.
"""

import numpy as np

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_DOCUMENTS = 12_000
NUM_HELD_OUT = 400

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

NAMES = ["Ada", "Ben", "Clara", "David", "Emma", "Felix"]
PLACES = ["garden", "market", "river", "school", "harbour", "library"]
THINGS = ["book", "lamp", "boat", "kite", "basket", "letter"]
COLOURS = ["red", "green", "blue", "yellow", "white"]
FOODS = ["apples", "bread", "cheese", "tea", "rice", "pears", "honey"]
FOREIGN = [  # characters outside ASCII take several byte tokens each
    ("cat", "le chat", "die Katze", "猫", "🐱"),
    ("boy", "le garçon", "der Junge", "男孩", "👦"),
    ("tree", "l'arbre", "der Baum", "木", "🌳"),
    ("summer", "l'été", "der Sommer", "夏", "🌞"),
    ("key", "la clé", "der Schlüssel", "鍵", "🔑"),
]
EXPLAINED = [
    ("tides", "The moon pulls the sea, so the water rises and falls twice a day."),
    ("rain", "Warm air carries water up. When the air cools, the water falls as rain."),
    ("night", "The earth turns, so each side faces away from the sun for some hours."),
    ("bread", "Flour, water and salt are mixed, left to rise, and baked in a hot oven."),
]
SENTENCES = [
    "{name} went to the {place} with a {colour} {thing}.",
    "{name} found a {thing} near the {place}.",
    "The {thing} was {colour} and very old.",
    "{name} gave the {thing} to {other}.",
    "In the evening {name} and {other} walked home from the {place}.",
    "{other} asked {name} for some {food}.",
    "It rained, so {name} stayed in the {place}.",
]
TEXTS = [
    "{story}",
    "{a} + {b} = {a_plus_b}\n{b} + {c} = {b_plus_c}\n{c} + {a} = {c_plus_a}",
    "Count from {first} to {last}: {up}.",
    "Count from {last} to {first}: {down}.",
    "{name} buys:\n- {food}\n- {food2}\n- {food3}",
    "{name} sells:\n1. {food}\n2. {food2}\n3. {food3}\n4. {food4}",
    "def add_{a}({variable}):\n    return {variable} + {a}\n\nprint(add_{a}({b}))",
    "for {variable} in range({a}):\n    if {variable} > {b}:\n        print('{food}', {variable})",
    "name: {name}\ncolour: {colour}\nsize: {size}\nset size to {size2}\nname: {name}\ncolour: {colour}\nsize: {size2}",
    '{{"name": "{name}", "colour": "{colour}"}}\nset name to {other}\n{{"name": "{other}", "colour": "{colour}"}}',
    "{word} = {french} | {german} | {sign} | {emoji}",
]
CHATS = [
    ("What is {a} + {b}?", "{a} + {b} = {a_plus_b}."),
    ("Explain {topic}.", "{explanation}"),
    ("Count from {first} to {last}.", "{up}."),
    ("What is {word} in German?", "It is {german}. {emoji}"),
    ("Name three foods.", "{food}, {food2} and {food3}."),
    ("Tell me a story.", "{story}"),
]


def make_document(rng: np.random.Generator) -> str:
    """Fills one template with random facts: seven of eleven documents are plain text, the others ChatML."""

    def some(options: list[str], count: int) -> list[str]:
        return [options[i] for i in rng.permutation(len(options))[:count]]

    (a, b, c), first, length = rng.integers(0, 10, 3), rng.integers(10, 40), rng.integers(4, 8)
    numbers = [str(first + i) for i in range(length)]
    facts = dict(zip(("food", "food2", "food3", "food4"), some(FOODS, 4), strict=True))
    facts |= dict(zip(("word", "french", "german", "sign", "emoji"), FOREIGN[rng.integers(len(FOREIGN))], strict=True))
    facts |= dict(zip(("topic", "explanation"), EXPLAINED[rng.integers(len(EXPLAINED))], strict=True))
    facts |= {"first": numbers[0], "last": numbers[-1], "up": ", ".join(numbers), "down": ", ".join(reversed(numbers))}
    facts |= {"a": a, "b": b, "c": c, "a_plus_b": a + b, "b_plus_c": b + c, "c_plus_a": c + a}
    facts |= dict(zip(("name", "other"), some(NAMES, 2), strict=True)) | {"variable": "xnk"[rng.integers(3)]}
    facts |= {"place": some(PLACES, 1)[0], "thing": some(THINGS, 1)[0], "colour": some(COLOURS, 1)[0]}
    facts |= {"size": rng.integers(10, 99), "size2": rng.integers(10, 99)}
    facts["story"] = " ".join(some(SENTENCES, rng.integers(2, 5))).format(**facts)
    if rng.integers(11) < 7:
        return TEXTS[rng.integers(len(TEXTS))].format(**facts)
    question, answer = CHATS[rng.integers(len(CHATS))]
    system = f"{IM_START}system\nYou are helpful.{IM_END}\n" if rng.integers(4) == 0 else ""
    turns = f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{answer}{IM_END}\n".format(**facts)
    return system + turns


def make_corpus(seed: int) -> tuple[list[str], list[str]]:
    """Returns the training documents and the held-out ones, which occur nowhere among the first."""
    rng = np.random.default_rng(seed)
    training = [make_document(rng) for _ in range(NUM_DOCUMENTS)]
    seen, held_out = set(training), []
    while len(held_out) < NUM_HELD_OUT:
        document = make_document(rng)
        if document not in seen:
            held_out.append(document)
    return training, held_out
