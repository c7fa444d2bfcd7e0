"""The faults that `benchmarks/mutants` plants are faults of the code as it is."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.mutants.run import read_mutants, why_not_planted


def test_every_mutant_can_be_planted() -> None:
    mutants = read_mutants()  # exits with the names of those that cannot
    assert mutants


def test_what_keeps_a_mutant_from_being_planted_is_said() -> None:
    mutant = read_mutants()[0]
    assert not list(why_not_planted(mutant))
    (gone,) = why_not_planted(replace(mutant, file="harmony_ds/model/gone.py"))
    assert "there is no file" in gone
    (moved,) = why_not_planted(replace(mutant, old="what no line says"))
    assert "occurs 0 times" in moved
    (same,) = why_not_planted(replace(mutant, new=mutant.old))
    assert "new text is the old one" in same
