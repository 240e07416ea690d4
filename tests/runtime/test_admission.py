"""Which kinds of calls get a graph: counts, their decay, and traffic replayed against the rule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable
from types import SimpleNamespace

import pytest

from kernl.runtime.admission import Admission


def test_a_newcomer_must_be_ahead() -> None:
    admission, oldest = Admission(8), SimpleNamespace(uses=3)
    answers = [admission.admits("new", oldest, [oldest]) for _ in range(8)]
    assert answers == [False] * 7 + [True]
    assert not admission.admits("new", oldest, [oldest]), "admitted means forgotten"


def test_counts_are_halved() -> None:
    admission, resident = Admission(2), SimpleNamespace(uses=9)
    for number in range(8):
        admission.admits(number % 4, resident, [resident])
    assert resident.uses == 4 and set(admission._calls.values()) == {1}


def test_clear() -> None:
    admission, oldest = Admission(8), SimpleNamespace(uses=0)
    for _ in range(4):
        admission.admits("new", oldest, [oldest])
    admission.clear()
    assert not admission.admits("new", oldest, [oldest])


def captures(draw: Callable[[int], Hashable], calls: int = 8000, places: int = 64) -> int:
    """How many graphs are captured while such calls come in."""
    admission = Admission(places)
    graphs: dict[Hashable, SimpleNamespace] = {}
    count = 0
    for moment in range(calls):
        key = draw(moment)
        if key in graphs:
            graphs[key].uses += 1
            graphs[key].last_used = moment
            continue
        if len(graphs) == places:
            oldest = min(graphs, key=lambda key: graphs[key].last_used)
            if not admission.admits(key, graphs[oldest], graphs.values()):
                continue
            del graphs[oldest]
        graphs[key] = SimpleNamespace(uses=0, last_used=moment)
        count += 1
    return count


@pytest.mark.parametrize("seed", range(3))
def test_traffic(seed: int) -> None:
    rng = random.Random(seed)

    def length(_: int) -> int:
        return min(512, max(8, round(math.exp(rng.gauss(math.log(64), 0.8)))))

    assert captures(lambda _: rng.randrange(60)) == 60, "all fit"
    assert captures(lambda _: rng.randrange(2000)) < 100
    assert captures(lambda moment: (rng.randint(1, 16), length(moment))) < 100
    assert captures(length) < 300
    assert captures(lambda moment: rng.randrange(60) + moment // 2000 * 1000) > 3 * 60, "new shapes get their graphs"
