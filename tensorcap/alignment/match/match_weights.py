"""Weights of matching: what each clue says for or against a pair. All numbers in nats are here, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MatchWeights:
    """Scores that matching adds up: log-odds that two site templates correspond, all in nats.

    Attributes:
        proof: Values prove a pair from here on: one in 400 agrees so well by chance.
        tensor_most: Most that one tensor may prove: its statistics are not independent of one another.
        fusion_least: Agreement of added-up statistics counts from here on: below, chance does as well.
        reported_least: Agreement is named as a reason from here on; less is not worth a word.
        pair_margin: By how much a pair must be better than its rivals, or it waits: three to one.
        fusion_margin: The same for several tensors fused to one.
        placement_margin: The same for a pair by place, of which the best alignment is optimal as a whole.
        main_output_differs: One is the main output of its module, the other a further one.
        nesting_differs: One contains other modules, the other does not; wrappers do that to equal modules.
        family_equal: Both are of one kind of module by class or name, such as norm or attention.
        family_differs: They are of two kinds.
        size_differs: Outputs have unlike numbers of elements; only slicing or padding explains that.
        parameters_equal: Parameters have equal shapes, axes in any order.
        largest_parameter_equal: Only the largest has; biases may be fused or absent.
        parameters_differ: Not even the largest has.
        parameters_one_sided: Only one has parameters, though both are known modules.
        fused_parameters_equal: The parts' largest parameters add up to the whole's.
        name_equal: Names are equal, as they are or by rules: more than the proof that values need.
        arguments_equal: An argument of one has the values of an argument of the other.
        arguments_differ: No argument has.
        standing_equal: Among sites with equal values both come equally early, or late: breaks ties only.
        children_paired: All that one contains is paired with what the other contains.
        children_unpaired: Nothing of it is.
        name_words: All words of the last part of their names are equal.
        shape_most: Most that an equal shape may say: the rarer, the more.
        placement_least: A pair by place needs at least that.
        placement_pair: A pair is better than none by that.
        placement_alone: Both stand alone between the same neighbours.
        lone_child: Two that are left within paired modules need that: one kind, parameters of one size.
    """

    proof: float = 6.0
    tensor_most: float = 20.0
    fusion_least: float = 1.0
    reported_least: float = 2.0
    pair_margin: float = 1.0
    fusion_margin: float = 1.0
    placement_margin: float = 0.5
    main_output_differs: float = -2.0
    nesting_differs: float = -1.0
    family_equal: float = 2.0
    family_differs: float = -2.0
    size_differs: float = -6.0
    parameters_equal: float = 3.0
    largest_parameter_equal: float = 2.0
    parameters_differ: float = -4.0
    parameters_one_sided: float = -3.0
    fused_parameters_equal: float = 3.0
    name_equal: float = 8.0
    arguments_equal: float = 5.0
    arguments_differ: float = -3.0
    standing_equal: float = 0.3
    children_paired: float = 6.0
    children_unpaired: float = -6.0
    name_words: float = 2.0
    shape_most: float = 2.0
    placement_least: float = 0.25
    placement_pair: float = 1.0
    placement_alone: float = 1.0
    lone_child: float = 4.0


WEIGHTS: Final = MatchWeights()
