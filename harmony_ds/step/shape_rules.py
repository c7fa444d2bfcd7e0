"""Rules by which the shapes of a model's outputs follow from those of its arguments, learned from calls.

    call with arguments of (8, 12), gave (8, 12, 50):  each size is constant, or follows one of the arguments' sizes
    call with arguments of (4, 15), gave (4, 15, 50):  the first two follow the arguments', the last is constant
    call with arguments of (6, 20):                    will give (6, 20, 50)

Rules that a call contradicts are dropped. Where those that are left disagree, nothing is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from harmony_ds.profiling.sample import InputShapes
from harmony_ds.step.output_structure import Path, TensorLeaf

_Ranks = tuple[int, ...]
"""How many dimensions each tensor among the arguments has."""


@dataclass(frozen=True, slots=True)
class SizeRule:
    """The size of a dimension: that of a dimension of an argument, times a factor, plus an offset.

    Attributes:
        argument: a tensor among the arguments; None: the size is constant, its offset.
        dimension: of that tensor; None: all its dimensions as one (tokens of all rows).
    """

    argument: int | None
    dimension: int | None
    factor: Fraction
    offset: int

    def size(self, inputs: InputShapes) -> Fraction:
        if self.argument is None:
            return Fraction(self.offset)
        shape = inputs[self.argument]
        given = math.prod(shape) if self.dimension is None else shape[self.dimension]
        return given * self.factor + self.offset


class ShapeRules:
    """Rules for every tensor among a model's outputs."""

    def __init__(self) -> None:
        self._numbers: dict[Path, torch.Size | None] = {}
        self._rules: dict[tuple[_Ranks, Path], list[list[SizeRule]]] = {}

    def learn(self, inputs: InputShapes, leaf: TensorLeaf) -> None:
        """Learn that a call with arguments of shapes `inputs` returned `leaf`."""
        path, shape = leaf.path, leaf.shape
        # One row's logits have one number, too, but a dimension, or one with other rows.
        named_loss = bool(path) and path[-1][1] == "loss" and shape.numel() == 1
        number = shape if named_loss or not shape else None
        self._numbers[path] = number if self._numbers.get(path, number) == number else None
        key = tuple(map(len, inputs)), path
        rules = self._rules.get(key)
        if rules is None:
            self._rules[key] = [_rules_for(size, inputs) for size in shape]
        elif len(rules) != len(shape):
            self._rules[key] = [[]]
        else:
            self._rules[key] = [
                [rule for rule in of_dimension if rule.size(inputs) == size]
                for of_dimension, size in zip(rules, shape, strict=True)
            ]

    def number(self, path: Path) -> torch.Size | None:
        """Return the shape of one number that has it whatever is given; None: it is none."""
        return self._numbers.get(path)

    def shape(self, inputs: InputShapes, path: Path) -> torch.Size | None:
        """Return the shape that arguments of shapes `inputs` lead to; None: it is not known."""
        rules = self._rules.get((tuple(map(len, inputs)), path))
        if rules is None:
            return None
        shape = []
        for of_dimension in rules:
            sizes = {rule.size(inputs) for rule in of_dimension}
            size = sizes.pop() if len(sizes) == 1 else Fraction(-1)
            if size < 0 or size.denominator != 1:
                return None
            shape.append(int(size))
        return torch.Size(shape)


def _rules_for(size: int, inputs: InputShapes) -> list[SizeRule]:
    """Return all rules that give `size`."""
    rules = [SizeRule(None, 0, Fraction(1), size)]
    for argument, shape in enumerate(inputs):
        for dimension, given in (*enumerate(shape), (None, math.prod(shape))):
            rules.append(SizeRule(argument, dimension, Fraction(1), size - given))
            if given and size != given:
                rules.append(SizeRule(argument, dimension, Fraction(size, given), 0))
    return rules
