"""Short word problems with their working, in the form of GSM8K's answers."""

from __future__ import annotations

from random import Random

from examples.embedded_model.wide import WideFillers

PRONOUN = ("He", "She")


class Sums:
    """Draws word problems of one to three steps over small numbers.

    Args:
        rng: Source of all choices.
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.fillers = WideFillers(rng)

    def problem(self) -> tuple[str, str, str]:
        """(question, worked answer, the sum as an expression)."""
        number = self.rng.randint
        name = self.fillers.word("first")
        other = self.rng.choice(
            ("a friend", "his sister", "her brother", self.fillers.word("first"))
        )
        box = self.rng.choice(("boxes", "bags", "packs", "shelves", "baskets", "crates", "jars"))
        things = self.rng.choice(
            ("pencils", "apples", "books", "coins", "cards", "eggs", "stickers", "marbles", "pens")
        )
        pronoun = self.rng.choice(PRONOUN)
        count, each = number(2, 12), number(2, 12)
        product = count * each
        has = self.rng.choice(("has", "buys", "owns", "gets", "carries"))
        start = self.rng.choice(
            (
                f"{name} {has} {count} {box} with {each} {things} each.",
                f"{name} {has} {count} {box} of {things}, {each} in each.",
                f"There are {count} {box} with {each} {things} in each. They belong to {name}.",
                f"{name} {has} {count} {box}. Each has {each} {things}.",
            )
        )
        first = f"{name} has {count}*{each}=<<{count}*{each}={product}>>{product} {things}."
        kind = self.rng.random()
        if kind < 0.15:
            price = number(2, 30)
            total = count * price
            question = self.rng.choice(
                (
                    f"A ticket costs ${price}. How much do {count} tickets cost?",
                    f"One {things[:-1]} costs ${price}. {name} buys {count}. What is the price?",
                    f"{count} {things} cost ${price} each. How much is that in all?",
                )
            )
            work = f"{count}*{price}=$<<{count}*{price}={total}>>{total}"
            return question, f"The price is {work}.\n#### {total}", f"{count} * {price}"
        if kind < 0.3:
            asked = f"How many {things} does {name} have?"
            return f"{start} {asked}", f"{first}\n#### {product}", f"{count} * {each}"
        change = number(1, product - 1) if kind < 0.75 else number(1, 60)
        if kind < 0.75:
            middle = self.rng.choice(
                (
                    f"{pronoun} gives {change} {things} to {other}.",
                    f"{pronoun} gives {change} away.",
                    f"{pronoun} loses {change} of them.", f"{change} of them break.",
                    f"{pronoun} sells {change} {things}.", f"{pronoun} uses {change}.",
                )
            )  # fmt: skip
            asked = self.rng.choice(
                (f"How many {things} are left?", f"How many {things} does {name} have left?",
                 "How many are left?", f"How many {things} does {name} have now?")
            )  # fmt: skip
            sign, total = "-", product - change
        else:
            middle = self.rng.choice(
                (f"{pronoun} finds {change} more.",
                 f"{other.capitalize()} gives {name} {change} more.",
                 f"{pronoun} buys {change} {things} more.")
            )  # fmt: skip
            asked = f"How many {things} does {name} have now?"
            sign, total = "+", product + change
        last = f"{product}{sign}{change}=<<{product}{sign}{change}={total}>>{total}"
        ending = f"{pronoun} has {last} {things}" + (" left." if sign == "-" else " now.")
        answer = f"{first}\n{ending}\n#### {total}"
        return f"{start} {middle} {asked}", answer, f"{count} * {each} {sign} {change}"
