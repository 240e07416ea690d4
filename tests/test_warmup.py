"""What `model.kernl.warmup` makes of its argument; test_pipeline_with_graphs.py tests what it compiles and captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertTokenizerFast

import kernl
from kernl.warmup import batches_to_warm_up
from tests import tiny


def shapes_of(batches: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(batch["input_ids"].shape) for batch in batches]


def test_largest_first() -> None:
    batches = batches_to_warm_up(tiny.bert(), [(1, 4), (3, 8), (2, 5)])
    assert shapes_of(batches) == [(3, 8), (2, 5), (1, 4)]
    assert all(batch["attention_mask"].shape == batch["input_ids"].shape for batch in batches)


def test_inputs_are_taken_as_they_are() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    batches = batches_to_warm_up(tiny.bert(), [{"input_ids": ids}, (ids,), ids])
    assert batches[0]["input_ids"] is ids and batches[1][0] is ids and batches[2] is ids


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (3, r"shapes is 3; accepted: a list"),
        (None, r"shapes is None; accepted: a list"),
        ("powers", r"shapes is 'powers'; accepted: a list"),
        (torch.ones(2, 3), r"shapes is a Tensor; accepted: a list"),
        ({"input_ids": torch.ones(1, 2)}, r"shapes is a dict; accepted: a list"),
        ((2, 5), r"shapes is \(2, 5\), a shape by itself: give a list, \[\(2, 5\)\]"),
        ([5, 6], r"a shape by itself: give a list, \[\(5, 6\)\]"),
        ([(1, 2), "text"], r"shapes holds 'text'; accepted: a list"),
        ([(1, 2), 5], r"shapes holds 5; accepted: a list"),
    ],
    ids=str,
)
def test_what_is_no_list_of_shapes(shapes: Any, message: str) -> None:
    model = kernl.optimize_model(tiny.bert())
    with pytest.raises(TypeError, match=message):
        model.kernl.warmup(shapes, progress=False)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, "a")], r"shapes holds \(2, 'a'\), in which there is no tensor"),
        ([{"input_ids": [1, 2]}], r"shapes holds a dict, in which there is no tensor"),
        ([()], r"shapes holds \(\), in which there is no tensor"),
        ([(0, 3)], r"shape \(0, 3\): accepted are sizes from 1 up"),
        ([(2, 3, 4)], r"shape \(2, 3, 4\): the inputs of a BertModel cannot be guessed"),
    ],
    ids=str,
)
def test_items_that_are_no_call(shapes: Any, message: str) -> None:
    model = kernl.optimize_model(tiny.bert())
    with pytest.raises(ValueError, match=message):
        model.kernl.warmup(shapes, progress=False)


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizerFast:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]))
    return BertTokenizerFast(str(tmp_path / "vocab.txt"))


def test_the_shapes_that_texts_have(tokenizer: BertTokenizerFast) -> None:
    texts = ["one", "two two two", "two", "one one", "one", "two"]
    batches = batches_to_warm_up(tiny.bert(), "auto", tokenizer=tokenizer, texts=texts, batch_size=2)
    assert shapes_of(batches) == [(2, 5), (2, 4), (2, 3)]
    assert batches[0]["attention_mask"].sum() == 3 + 5, "real masks: padding is padding"
    both = batches_to_warm_up(tiny.bert(), "auto", tokenizer=tokenizer, texts=texts, batch_size=[1, 4])
    assert shapes_of(both) == [(4, 5), (2, 3), (1, 5), (1, 4), (1, 3)]


def test_auto_prepares_what_comes(tokenizer: BertTokenizerFast) -> None:
    model = kernl.optimize_model(tiny.bert(vocab_size=50))
    texts = ["one two", "two", "one one one"]
    with torch.inference_mode():
        model.kernl.warmup("auto", progress=False, tokenizer=tokenizer, texts=texts, batch_size=2)
        before = model.kernl.report().calls.direct
        model(**tokenizer(texts[:2], padding=True, return_tensors="pt"))
    assert model.kernl.report().calls.direct == before + 1


def test_auto_says_what_it_needs(tokenizer: BertTokenizerFast) -> None:
    model = tiny.bert()
    with pytest.raises(TypeError, match=r'"auto" needs tokenizer='):
        batches_to_warm_up(model, "auto", texts=["one"])
    for texts in (None, "one"):
        with pytest.raises(TypeError, match=r'"auto" needs texts='):
            batches_to_warm_up(model, "auto", tokenizer=tokenizer, texts=texts)
    for no_texts in ([], [1]):
        with pytest.raises(ValueError, match="texts: accepted is a list of strings"):
            batches_to_warm_up(model, "auto", tokenizer=tokenizer, texts=no_texts)  # type: ignore[arg-type]
    for size in (0, [], ["1"]):
        with pytest.raises(ValueError, match="batch_size="):
            batches_to_warm_up(model, "auto", tokenizer=tokenizer, texts=["one"], batch_size=size)
    with pytest.raises(ValueError, match='go with shapes="auto"'):
        batches_to_warm_up(model, [(1, 2)], texts=["one"])
