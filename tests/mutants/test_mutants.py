"""The faults still apply, and the runner tells a killed fault from a survivor."""

import mutants
import pytest
from faults import CPU_FAULTS, CUDA_FAULTS, FAULTS, REFERENCE, SUITE, Fault


def test_every_text_is_found_once():
    counts = {f"{fault.file}: {fault.name}": mutants.count_of(fault) for fault in FAULTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert all(fault.text != fault.replacement for fault in FAULTS)
    assert len(set(FAULTS)) == len(FAULTS)


def test_enough_faults_are_told_without_a_gpu():
    assert len(CPU_FAULTS) >= 15
    assert len(CUDA_FAULTS) >= 10


# What no suite can see, and what no compiler takes.
HARMLESS = Fault(
    name="harmless",
    text="int length = 0;",
    replacement="int length{0};",
    file="csrc/include/kdtree/accept_tree.h",
    killer=SUITE,
)
UNCOMPILABLE = HARMLESS._replace(replacement="int length = ;")
MISSING = HARMLESS._replace(text="no such text")


def named(name: str) -> Fault:
    [fault] = [f for f in FAULTS if f"{f.file.rpartition('/')[2]}: {f.name}" == name]
    return fault


@pytest.fixture(scope="module")
def outcomes() -> dict[Fault, mutants.Outcome]:
    killed = (
        "build_tree.h: tie order flipped",
        "accept_tree.py: bonus of the root",
        "build_tree.py: parent mask not inherited",
    )
    return mutants.run([*map(named, killed), HARMLESS, UNCOMPILABLE, MISSING])


def test_a_few_faults_are_killed(outcomes):
    killed = {f.name: o for f, o in outcomes.items() if o.verdict == mutants.KILLED}
    assert len(killed) == 3
    assert killed["tie order flipped"].reason.startswith("build-ties.kdtr: out.")
    assert "test_reference_accept.py" in killed["bonus of the root"].reason


def test_survivors_and_broken_faults_are_told(outcomes):
    assert outcomes[HARMLESS] == (mutants.SURVIVED, "")
    assert outcomes[UNCOMPILABLE].verdict == mutants.BROKEN
    assert "accept_tree.h" in outcomes[UNCOMPILABLE].reason
    assert outcomes[MISSING] == (mutants.BROKEN, f"its text is 0 times in {MISSING.file}")


def test_the_reference_suite_is_the_one_named():
    assert {f.killer for f in FAULTS if f.file.endswith(".py")} == {REFERENCE}
