"""The mixin before TRL's trainers: checkpoints that resume bit for bit, reports, checks, signals."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from envs.errors import UserError
from tests.trainers.tiny_language import Recipe, differences, make_learner, make_model, newest, train
from trainers.metrics import read_metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


KINDS = [
    ("sft", False),
    ("sft", True),
    ("dpo", False),
    ("dpo", True),
    ("reward_model", False),
    ("pretrain", False),
]


def numbers(run: Any) -> list[dict[str, Any]]:
    """The metrics, without the clock."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(run.path)]


@pytest.mark.parametrize(("kind", "lora"), KINDS)
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(
    kind: str, lora: bool, model: str, tmp_path: Path
) -> None:
    whole = train(Recipe(kind, model, lora=lora), tmp_path, "whole")
    again = train(Recipe(kind, model, lora=lora), tmp_path, "again")
    assert not differences(newest(whole), newest(again))
    assert len(numbers(whole)) == 6
    for step in (1, 3, 5):  # within an epoch, at the end of one, in the second
        broken = train(Recipe(kind, model, lora=lora, stop_after=step), tmp_path, f"broken-{step}")
        assert numbers(broken)[-1]["step"] == step
        resumed = train(Recipe(kind, model, lora=lora), tmp_path, f"broken-{step}")
        assert not differences(newest(whole), newest(resumed)), step
        assert numbers(resumed) == numbers(whole)


def test_every_attempt_has_its_number_and_a_finished_run_takes_no_more_steps(
    model: str, tmp_path: Path
) -> None:
    attempts = []
    for stop in (2, 4, None, None):
        run = train(Recipe(model=model, stop_after=stop), tmp_path)
        saved = run.latest()
        assert saved is not None
        attempts.append((saved[0], saved[1]["attempt"]))
    assert attempts == [(2, 0), (4, 1), (6, 2), (6, 2)]


def test_a_checkpoint_holds_no_pickle_and_the_trainer_writes_no_folder_of_its_own(
    model: str, tmp_path: Path
) -> None:
    run = train(Recipe(model=model, steps=2), tmp_path)
    names = {p.name for p in (run.path / "checkpoints").rglob("*") if p.is_file()}
    assert names == {"arrays.safetensors", "state.json", "manifest.json"}
    assert not list(tmp_path.rglob("*.pt")) + list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("*.pth"))


def test_adapters_alone_are_trained_and_saved(model: str, tmp_path: Path) -> None:
    state = newest(train(Recipe(model=model, lora=True, steps=2), tmp_path))["model"]
    assert len(state) == 2 * 2 * 2  # A and B, of q and v, in two layers
    assert all("lora_" in name for name in state)
    assert any(np.any(value) for name, value in state.items() if "lora_B" in name)  # they start at zero


def test_metrics_are_trls_own_one_line_a_step(model: str, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Listener(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    run = train(Recipe(model=model, callbacks=[Listener()]), tmp_path)
    lines = read_metrics(run.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line, logs in zip(lines, seen, strict=False):
        assert {k: v for k, v in line.items() if k not in ("step", "seconds")} == logs
    assert {"loss", "grad_norm", "learning_rate", "mean_token_accuracy", "num_tokens"} <= lines[0].keys()


def test_a_callback_of_the_user_may_stop_and_save(model: str, tmp_path: Path) -> None:
    class Stopper(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = control.should_save = state.global_step == 3
            return control

    run = train(Recipe(model=model, every=100, callbacks=[Stopper]), tmp_path)
    assert numbers(run)[-1]["step"] == 3
    saved = run.latest()
    assert saved is not None
    assert saved[0] == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_after_the_step(number: signal.Signals, model: str, tmp_path: Path) -> None:
    class Interrupted(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), number)

    run = train(Recipe(model=model, every=100, callbacks=[Interrupted()]), tmp_path)
    status = json.loads((run.path / "status.json").read_text())
    assert (status["status"], status["reason"], status["step"]) == ("stopped", number.name, 3)
    whole = train(Recipe(model=model, every=100), tmp_path, "whole")
    assert not differences(newest(whole), newest(train(Recipe(model=model, every=100), tmp_path)))


def poison(name: str, value: float = math.nan) -> transformers.TrainerCallback:
    """Puts `value` into one weight before the third step."""

    class Poison(transformers.TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            if state.global_step == 2:
                dict(model.named_parameters())[name].data.view(-1)[0] = value

    return Poison()


def test_a_loss_that_is_nan_names_step_and_first_bad_tensor(model: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UserError, match="loss became nan at step 3") as error:
        train(Recipe(model=model, callbacks=[poison(name)]), tmp_path)
    assert f"the parameter {name}" in str(error.value)
    saved = train(Recipe(model=model, steps=2), tmp_path).latest()  # what was saved before is whole
    assert saved is not None
    assert saved[0] == 2


def test_a_module_that_overflows_names_itself_and_the_row(model: str, tmp_path: Path) -> None:
    def make(recipe: Recipe, context: Any) -> Any:
        learner = make_learner(recipe, context)

        def overflow(module: Any, args: Any, output: Any) -> Any:
            if learner.state.global_step == 1:
                output = output.clone()
                output[2] = math.inf
            return output

        learner.model.model.layers[0].mlp.register_forward_hook(overflow)
        return learner

    with pytest.raises(UserError, match="loss became nan at step 2") as error:
        train(Recipe(model=model), tmp_path, make=make)
    assert "the output of model.layers.0.mlp (row 2, '" in str(error.value)
    assert "of the micro-batch)" in str(error.value)


def test_a_gradient_that_is_not_finite_is_named_before_it_reaches_the_weights(
    model: str, tmp_path: Path
) -> None:
    name, before = "model.layers.0.self_attn.q_proj.weight", {}

    class Poison(transformers.TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            before.update({n: p.detach().clone() for n, p in model.named_parameters()})
            before["model"] = model
            if state.global_step == 1:
                dict(model.named_parameters())[name].register_hook(lambda grad: grad * math.inf)

    with pytest.raises(UserError, match=r"grad_norm became (nan|inf) at step 2") as error:
        train(Recipe(model=model, callbacks=[Poison()]), tmp_path)
    assert f"the gradient of {name}" in str(error.value)
    trained = before.pop("model")
    assert all(torch.equal(before[n], p) for n, p in trained.named_parameters())


def test_a_step_that_changes_nothing_is_an_error_unless_the_rate_is_zero(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step 1 changed no byte of the model") as error:
        train(Recipe(model=model, lr=1e-30), tmp_path, "stuck")
    assert "learning rate 1e-30" in str(error.value)
    still = train(Recipe(model=model, lr=0.0), tmp_path, "still")
    first = transformers.LlamaForCausalLM.from_pretrained(model).state_dict()
    state = newest(still)["model"]
    assert all(np.array_equal(value, first[name]) for name, value in state.items())


def test_low_precision_reports_the_share_that_changed(model: str, tmp_path: Path) -> None:
    def make(recipe: Recipe, context: Any) -> Any:
        learner = make_learner(recipe, context)
        learner.model.to(torch.bfloat16)
        return learner

    run = train(Recipe(model=model, steps=2, lr=1e-2), tmp_path, "fast", make)
    shares = [line["changed_share"] for line in read_metrics(run.path)]
    assert all(0.5 < share <= 1 for share in shares)  # a step of 1e-2 moves most weights of size 2e-2
    train(Recipe(model=model, steps=2, lr=1e-2, stop_after=1), tmp_path, "broken", make)
    again = train(Recipe(model=model, steps=2, lr=1e-2), tmp_path, "broken", make)
    assert differences(newest(run), newest(again)) == []
    run = train(Recipe(model=model, steps=9, lr=1e-12), tmp_path, "slow", make)
    assert [line["changed_share"] for line in read_metrics(run.path)] == [0.0] * 9
    with pytest.raises(UserError, match="step 10 changed no byte"):
        train(Recipe(model=model, steps=20, lr=1e-12), tmp_path, "stuck", make)


def test_folders_of_torch_files_are_refused(model: str, tmp_path: Path) -> None:
    def make(recipe: Recipe, context: Any) -> Any:
        learner = make_learner(recipe, context)
        learner.learn = lambda: learner.train(resume_from_checkpoint=str(tmp_path))
        return learner

    with pytest.raises(UserError, match="does not resume from a folder of torch files"):
        train(Recipe(model=model), tmp_path, make=make)


def test_a_checkpoint_of_another_learner_is_refused(model: str, tmp_path: Path) -> None:
    train(Recipe(model=model, stop_after=2), tmp_path)
    with pytest.raises(UserError, match="other parameters than this model") as error:
        train(Recipe(model=model, lora=True), tmp_path)
    assert "lora_A" in str(error.value)

    def wider(recipe: Recipe, context: Any) -> Any:
        context.resumed[1]["world_size"] = 2
        return make_learner(recipe, context)

    with pytest.raises(UserError, match="another number of learner processes") as error:
        train(Recipe(model=model), tmp_path, make=wider)
    assert "learner.num_workers=2" in str(error.value)


def test_a_trainer_that_sees_fewer_processes_than_were_placed_does_not_start(
    model: str, tmp_path: Path
) -> None:
    def make(recipe: Recipe, context: Any) -> Any:
        context.world_size = 2
        return make_learner(recipe, context)

    with pytest.raises(RuntimeError, match="sees 1 processes where 2 were placed"):
        train(Recipe(model=model), tmp_path, make=make)


# --- seams


def test_compose_chooses_the_rows_and_the_denominator_follows(model: str, tmp_path: Path) -> None:
    """Keeping rows 0 and 1 of each micro-batch of 4 is training on micro-batches of these 2 rows."""
    losses: list[float] = []

    def first_two(batches: list[Any], learner: Any) -> list[Any]:
        kept = [{key: value[:2] for key, value in batch.items()} for batch in batches]
        targets = [batch["labels"][:, 1:] for batch in kept]
        total = sum(int((t != -100).sum()) for t in targets)
        with torch.no_grad():
            logits = [learner.model(**{k: v for k, v in b.items() if k != "labels"}).logits for b in kept]
            losses.append(
                sum(
                    torch.nn.functional.cross_entropy(
                        z[:, :-1].flatten(0, 1), t.flatten(), reduction="sum"
                    ).item()
                    for z, t in zip(logits, targets, strict=True)
                )
                / total
            )
        return kept

    still = make_model(tmp_path / "model", dropout=0.0)
    run = train(Recipe(model=still, steps=3, seams={"compose": first_two}), tmp_path)
    reported = [line["loss"] for line in read_metrics(run.path)]
    assert np.allclose(reported, losses, atol=1e-6)


def test_compose_must_keep_the_number_of_micro_batches(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compose returned 1 micro-batches instead of 2"):
        train(Recipe(model=model, seams={"compose": lambda batches, learner: batches[:1]}), tmp_path)


def test_the_mean_of_the_gradients_is_the_plain_step(model: str, tmp_path: Path) -> None:
    plain = newest(train(Recipe(model=model, micro=2), tmp_path, "plain"))["model"]
    seen: list[tuple[int, ...]] = []

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(gradients.shape))
        return gradients.mean(0)

    same = newest(train(Recipe(model=model, micro=2, seams={"aggregate": mean}), tmp_path, "mean"))["model"]
    size = sum(value.size for value in plain.values())
    assert seen == [(4, size), (4, size), (2, size)] * 2  # an epoch ends with half a batch
    assert max(np.abs(plain[name] - same[name]).max() for name in plain) < 1e-6


def test_one_poisoned_gradient_does_not_move_the_median(model: str, tmp_path: Path) -> None:
    def attacked(rule: Any) -> Any:
        def aggregate(gradients: torch.Tensor) -> torch.Tensor:
            gradients[0] *= -1000
            return rule(gradients)

        return aggregate

    def final_loss(name: str, rule: Any) -> float:
        recipe = Recipe(model=model, micro=2, steps=12, lr=1e-2, seams={"aggregate": attacked(rule)})
        return read_metrics(train(recipe, tmp_path, name).path)[-1]["loss"]

    assert final_loss("median", lambda g: g.median(0).values) < 0.8 * final_loss("mean", lambda g: g.mean(0))


def test_after_step_adds_metrics(model: str, tmp_path: Path) -> None:
    run = train(
        Recipe(model=model, seams={"after_step": lambda learner, step: {"square": step**2}}), tmp_path
    )
    assert [line["square"] for line in read_metrics(run.path)] == [1, 4, 9, 16, 25, 36]
