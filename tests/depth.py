"""Which tests `make test` leaves out: they are marked `deep`, by the folder, file or test that they are.

`make test` is to say within minutes whether anything is broken: every mechanism once, each family once. `make test-all`
runs everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

Rule = Callable[[Sequence[pytest.Item]], Iterable[pytest.Item]]
"""Chooses, among the instances of one parametrized test, those that `make test` runs."""


def every(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return items


def none(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return ()


def one(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return items[:1]


def each_value(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    """Every value of every parameter at least once, not every combination."""
    return _covering(items, lambda parameters: parameters)


def each(name: str) -> Rule:
    """Every value of this parameter once."""
    return lambda items: _covering(items, lambda parameters: {name: parameters[name]})


def _covering(items: Sequence[pytest.Item], of_interest: Callable[[dict[str, object]], dict[str, object]]) -> Rule:
    seen: set[tuple[str, str]] = set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {"": None}
        values = {(name, repr(value)) for name, value in of_interest(parameters).items()}
        if not values <= seen:
            seen |= values
            yield item


RULES: dict[str, Rule] = {
    "tests": every,
    "tests/bench": one,
    "tests/bench/test_bench.py::test_two_processes_are_compared_as_one_engine": none,
    "tests/bench/test_bench.py::test_a_comparison_is_resumed_and_its_losses_agree": none,
    "tests/bench/test_bench.py::test_an_error_in_one_of_two_processes_is_the_row_s": none,
    "tests/calls": each_value,
    "tests/calls/test_compiling.py": one,
    "tests/checkpoint": none,
    "tests/checkpoint/test_refusals.py": one,
    "tests/checkpoint/test_resume.py": one,
    "tests/checkpoint/test_tree.py": every,
    "tests/checkpoint/test_export.py": one,
    "tests/compatibility": none,
    "tests/docs/test_reference.py": none,
    "tests/engine": one,
    "tests/engine/test_exactness.py": one,
    "tests/engine/test_exactness.py::test_three_steps_equal_plain_gradient_accumulation": each("one"),
    "tests/engine/test_host_memory.py": none,
    "tests/engine/test_ledger.py": every,
    "tests/engine/test_lifetime.py::test_a_process_leaves_in_peace_without_destroy": none,
    "tests/engine/test_lifetime.py::test_a_process_without_harmony_ds_reads_what_was_saved": none,
    "tests/engine/test_slices.py::test_auto_takes_slices_where_whole_micro_batches_do_not_fit": none,
    "tests/examples": none,
    "tests/integrations": none,
    "tests/integrations/test_trainer.py": one,
    "tests/integrations/test_trl.py": one,
    "tests/late_device": each_value,
    "tests/late_device/test_engine.py::test_training_is_that_of_plain_pytorch": each("setting"),
    "tests/offload/test_compiled.py": none,
    "tests/offload": each_value,
    "tests/parallel": none,
    "tests/parallel/test_exactness.py::test_training_is_that_of_plain_pytorch": one,
    "tests/parallel/test_failures.py::test_an_exception_reaches_all_and_nothing_is_updated": one,
    "tests/parallel/test_failures.py::test_differences_are_named_in_every_process": one,
    "tests/parallel/test_failures.py::test_reading_is_right_in_every_process": one,
    "tests/parallel/test_failures.py::test_the_others_notice_a_process_that_is_gone_or_stopped": one,
    "tests/parallel/test_host_room.py": one,
    "tests/parallel/test_servers.py::test_servers_train_to_the_bits_of_plain_pytorch": one,
    "tests/parallel/test_slots.py": every,
    "tests/scheduler/test_budgets.py": none,
    "tests/scheduler/test_correct.py": none,
    "tests/scheduler/test_search.py": one,
    "tests/scheduler/test_search.py::test_nothing_in_the_list_of_candidates_is_faster_than_what_is_chosen": none,
    "tests/simdevice": one,
    "tests/simdevice/test_engine_exactness.py::test_same_weights_as_plain_accumulation_and_a_peak_within_the_plan": each(
        "way"
    ),
    "tests/simdevice/test_engine_memory.py::test_a_model_trains_under_a_limit_that_plain_pytorch_exceeds": none,
    "tests/stepping/test_lessons.py": none,
    "tests/test_forecast.py": one,
    "tests/test_survey.py": one,
    "tests/test_survey.py::test_packs_that_stay_make_a_plan_faster_and_count_in_its_peak": none,
    "tests/test_survey.py::test_the_budget_is_the_ds_configs_or_what_the_engine_would_take": none,
}
"""By path from the repository's root, or by `path::test`; the longest one that an item is under decides."""


def mark_deep(items: Sequence[pytest.Item], root: Path) -> None:
    """Mark every item that its rule leaves out."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.path, getattr(item, "originalname", item.name)].append(item)
    for (path, name), instances in tests.items():
        kept = set(map(id, rule_of(path.relative_to(root), name)(instances)))
        for item in instances:
            if id(item) not in kept:
                item.add_marker(pytest.mark.deep)


def rule_of(path: Path, test: str) -> Rule:
    places = (f"{path}::{test}", str(path), *map(str, path.parents))
    return next(RULES[place] for place in places if place in RULES)
