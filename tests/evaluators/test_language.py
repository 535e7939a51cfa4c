"""Evaluation of language runs: what is counted by hand, and a real run against plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from envs.text_tasks import Prompt, make_task
from evaluators.language import Answers, answer, evaluate_run, ks_for, print_table, share_summary
from evaluators.statistics import rate_summary
from rollouts.engine import EngineSpec
from rollouts.pool import RolloutPool
from rollouts.samples import SamplingParams
from tests.trainers.language_runs import settings, start
from trainers.feed_batch import decode, encode
from trainers.run import Run

PROMPTS, SAMPLES = 12, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDBED_CACHE", str(folder / "cache"))
        yield start("sft", folder, "learner.steps=3", "rollout.max_new_tokens=12")


@pytest.fixture(scope="module")
def result(run: Run) -> dict[str, Any]:
    return evaluate_run(run.path, episodes=PROMPTS, seed=5, samples=SAMPLES)


def test_ks() -> None:
    assert [ks_for(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_failed_checks_are_left_out_not_wrong() -> None:
    answers = Answers(groups=[], right=[[True, False, None, False], [None, None, None, True], [None] * 4])
    first = answers.pass_at(1)
    assert first is not None
    assert (first["mean"], first["n"]) == (pytest.approx((1 / 3 + 1) / 2), 2)
    assert answers.pass_at(2) == rate_summary([False]) | {"mean": 2 / 3, "ci95": None}  # one prompt has two
    assert answers.pass_at(4) is None
    assert answers.accuracy() == rate_summary([True])
    assert answers.failures() == 8


def test_intervals_of_shares() -> None:
    assert share_summary([1.0] * 10) == rate_summary([True] * 10)  # Student's would have no width
    low, high = share_summary([0.0, 0.0, 0.0, 0.5])["ci95"] or (0, 0)
    assert low == 0.0
    # mean 1/8, standard error 1/8, t of 3 degrees of freedom 3.1824
    assert high == pytest.approx(0.125 * (1 + 3.182446305), abs=1e-8)


class Copied:
    """A task whose right answers are what plain transformers says greedily, to every second prompt."""

    untrusted_check, eval_size = False, PROMPTS

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.answers = []
        for i in range(PROMPTS):
            ids = torch.tensor([self.tokenizer(self.text(i))["input_ids"]])
            out = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
            self.answers.append(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def text(self, i: int) -> str:
        return f"{7 * i} + {i % 3} ="

    def eval(self, i: int) -> Prompt:
        return Prompt(id=f"eval-{i}", text=self.text(i), meta={"answer": self.answers[i] if i % 2 else "no"})

    def check(self, meta: dict[str, Any], completion: str) -> float:
        return float(completion == meta["answer"])


def test_greedy_answers_are_those_of_plain_transformers(run: Run) -> None:
    task = Copied(run.path / "model")
    pool = RolloutPool(EngineSpec(model_path=str(run.path / "model")))
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    answers = answer(
        pool,
        task.tokenizer,
        task,
        prompts=PROMPTS,
        samples=1,
        params=params,
        seed=0,
        encode=encode,
        decode=decode,
    )
    assert [group[0].completion for group in answers.groups] == task.answers
    assert answers.right == [[bool(i % 2)] for i in range(PROMPTS)]
    assert answers.accuracy() == rate_summary([bool(i % 2) for i in range(PROMPTS)])


def test_samples_are_judged_by_the_task(run: Run, result: dict[str, Any]) -> None:
    task = make_task(settings("sft", run.path.parent)[0].env)
    lines = [json.loads(line) for line in (run.path / "evaluation_samples.jsonl").read_text().splitlines()]
    prompts = [task.eval(i) for i in range(PROMPTS)]
    assert [line["prompt"] for line in lines] == [prompt.text for prompt in prompts]
    right = [task.check(p.meta, line["completion"]) == 1.0 for p, line in zip(prompts, lines)]
    assert [line["right"] for line in lines] == right
    assert result["greedy_accuracy"] == rate_summary(right)


def test_pass_at_k_grows_from_the_mean_to_any(result: dict[str, Any]) -> None:
    means = [result["pass_at_k"][str(k)]["mean"] for k in (1, 2, 4)]
    assert means == sorted(means)
    whole = means[0] * PROMPTS * SAMPLES  # pass@1 is the share of right samples
    assert whole == pytest.approx(round(whole), abs=1e-9)
    assert means[2] * PROMPTS == pytest.approx(round(means[2] * PROMPTS), abs=1e-9)


def test_what_is_written_is_what_is_returned_and_repeats(run: Run, result: dict[str, Any]) -> None:
    assert json.loads((run.path / "evaluation.json").read_text()) == result
    assert evaluate_run(run.path, episodes=PROMPTS, seed=5, samples=SAMPLES) == result
    assert (
        evaluate_run(run.path, episodes=PROMPTS, seed=6, samples=SAMPLES)["greedy_accuracy"]
        == (result["greedy_accuracy"])
    )
    assert (result["prompts"], result["samples_per_prompt"], result["failed_checks"]) == (PROMPTS, SAMPLES, 0)
    assert result["checkpoint_step"] == 3


def test_the_table_shows_every_number(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_table(result)
    shown = capsys.readouterr().out
    for text in ("pass@1", "pass@4", f"{result['greedy_accuracy']['mean']:.1%}", "tokens a completion"):
        assert text in shown


@pytest.mark.parametrize("wrong", [{"episodes": 0}, {"samples": 0}])
def test_nothing_to_do_is_refused(wrong: dict[str, int], run: Run) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        evaluate_run(run.path, **wrong)


def test_a_run_without_a_checkpoint_is_told(run: Run) -> None:
    _, values = settings("sft", run.path.parent)
    with Run.create(settings("sft", run.path.parent)[0].run, values, "empty") as empty:
        pass
    with pytest.raises(UserError, match="no checkpoint"):
        evaluate_run(empty.path, episodes=2)
