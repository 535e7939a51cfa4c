"""Learners on TRL's trainers: the losses are TRL's bit for bit, and what a user brings works unchanged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
import trl

from envs.errors import UserError
from tests.trainers.language_runs import start
from tests.trainers.tiny_language import ROWS, Recipe, build, make_model, newest, rows, train
from trainers.learners import LEARNERS, check_tokens, lora, named_callbacks
from trainers.metrics import read_metrics
from trainers.rows import check_rows, read_dataset, task_rows, training_rows

TRL = {
    "sft": trl.SFTTrainer,
    "pretrain": trl.SFTTrainer,
    "dpo": trl.DPOTrainer,
    "reward_model": trl.RewardTrainer,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


def trajectory(
    recipe: Recipe, cls: Any, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What a trainer logs at each step, and its final weights."""
    trainer = build(recipe, cls, recipe.arguments(str(folder)))
    # TRL's own would write its folders; ours has no run to write to.
    trainer.args.save_strategy = "no"
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", LEARNERS)
def test_losses_gradients_and_weights_are_trls_bit_for_bit(
    kind: str, lora: bool, model: str, tmp_path: Path
) -> None:
    recipe = Recipe(kind, model, lora=lora)
    theirs, ours = (trajectory(recipe, cls, tmp_path) for cls in (TRL[kind], LEARNERS[kind]))
    assert theirs[0] == ours[0]  # loss, grad_norm and every other metric of six steps
    assert len(ours[0]) == 6
    assert theirs[1].keys() == ours[1].keys()
    assert all(torch.equal(theirs[1][name], ours[1][name]) for name in ours[1])


@pytest.mark.parametrize("kind", LEARNERS)
def test_gradient_checkpointing_changes_no_gradient(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", dropout=0.0)

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}

        class Catch(transformers.TrainerCallback):
            def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
                assert model.is_gradient_checkpointing == checkpointing

            def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
                found.update({name: p.grad.clone() for name, p in model.named_parameters()})

        options = {"gradient_checkpointing": checkpointing}
        recipe = Recipe(kind, model, steps=1, trl=options, callbacks=[Catch()])
        trainer = build(recipe, LEARNERS[kind], recipe.arguments(str(tmp_path)))
        trainer.args.save_strategy = "no"
        trainer.train()
        return found

    plain, less_memory = gradients(False), gradients(True)
    assert all(torch.equal(plain[name], less_memory[name]) for name in plain)
    assert any(g.abs().max() > 0 for g in plain.values())


def test_sft_of_prompts_and_completions_learns_from_completions_only(tmp_path: Path) -> None:
    """By hand: mean negative log-likelihood of the answer and the end, given the prompt."""
    path = make_model(tmp_path / "model", dropout=0.0)
    run = train(Recipe(model=path, steps=1, micro=8, trl={"shuffle_dataset": False}), tmp_path)
    net = transformers.LlamaForCausalLM.from_pretrained(path)
    words = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    losses = []
    for prompt, answer in zip(*rows("sft").values(), strict=True):
        ids = torch.tensor([words(prompt + answer)["input_ids"] + [words.eos_token_id]])
        log_probs = net(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        losses.append(-log_probs[-2:])
    loss = read_metrics(run.path)[0]["loss"]
    means = [float(pair.detach().mean()) for pair in losses]
    assert min(means) <= loss <= max(means)
    order = list(torch.utils.data.RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(42)))
    assert loss == pytest.approx(float(torch.cat([losses[i].detach() for i in order[:8]]).mean()), abs=1e-6)


def test_the_first_dpo_loss_is_log_two(model: str, tmp_path: Path) -> None:
    """Before the first step the policy is the reference, so every margin is zero."""
    path = make_model(tmp_path / "model", dropout=0.0)
    first = read_metrics(train(Recipe("dpo", path, steps=1), tmp_path).path)[0]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["rewards/margins"] == 0


# --- datasets of the user


def written(kind: str, form: str, folder: Path) -> str:
    table = datasets.Dataset.from_dict(rows(kind))
    if form == "jsonl":
        table.to_json(folder / "rows.jsonl")
        return str(folder / "rows.jsonl")
    if form == "parquet":
        table.to_parquet(folder / "rows.parquet")
        return str(folder / "rows.parquet")
    table.save_to_disk(folder / "rows")
    return str(folder / "rows")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "folder"])
def test_a_dataset_on_disk_trains_as_the_object_does(form: str, model: str, tmp_path: Path) -> None:
    wanted = newest(train(Recipe(model=model, steps=2), tmp_path, "object"))["model"]
    read = read_dataset(written("sft", form, tmp_path), str(tmp_path / "cache"))
    found = newest(train(Recipe(model=model, steps=2, data=read), tmp_path, "disk"))["model"]
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def config(path: str | None, **env: Any) -> Any:
    return SimpleNamespace(
        env=SimpleNamespace(path=path, columns=env.get("columns"), task=env.get("task", "dataset")),
        learner=SimpleNamespace(samples_per_step=4, steps=3, trl={}),
    )


def test_columns_of_other_names_are_renamed(model: str, tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"question": ["1 + 1 = "], "answer": ["2"], "id": [7]})
    table.to_json(tmp_path / "rows.jsonl")
    cfg = config(str(tmp_path / "rows.jsonl"), columns={"prompt": "question", "completion": "answer"})
    found = training_rows("sft", cfg, None, None, str(tmp_path))
    assert found[0] == {"prompt": "1 + 1 = ", "completion": "2", "id": 7}


def test_missing_columns_are_listed_with_those_there(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"question": ["1"], "chosen": ["2"]})
    with pytest.raises(UserError, match="the dataset of here lacks columns that dpo needs") as error:
        check_rows("dpo", table, "here")
    assert "given:   \"columns ['chosen', 'question']\"" in str(error.value)
    assert "chosen and prompt and rejected; or chosen and rejected" in str(error.value)
    assert "env.columns" in str(error.value)


def test_an_empty_dataset_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the dataset of here has no rows"):
        check_rows("sft", datasets.Dataset.from_dict({"prompt": [], "completion": []}), "here")


@pytest.mark.parametrize(("name", "text"), [("none.jsonl", None), ("bad.jsonl", "{not json")])
def test_a_dataset_that_cannot_be_read_is_told(name: str, text: str | None, tmp_path: Path) -> None:
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="dataset") as error:
        read_dataset(str(tmp_path / name), str(tmp_path / "cache"))
    assert name in str(error.value)


# --- rows of a task


class Sums:
    """A text task: sums below ten; two blanks would be one word to the tokenizer."""

    train_size: int | None = 9

    def __init__(self, shown: bool = True) -> None:
        self.shown = shown

    def train(self, index: int) -> Any:
        return SimpleNamespace(text=f"{index} + 1 =", messages=None, meta={"sum": index + 1})

    def demonstration(self, index: int) -> str | None:
        return str(index + 1) if self.shown else None

    def check(self, meta: dict[str, Any], text: str) -> float:
        return float(text.strip() == str(meta["sum"]))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(model)


def test_demonstrations_keep_their_tokens_beside_the_prompt(tokenizer: Any) -> None:
    (row,) = task_rows("sft", Sums(), tokenizer, 1)
    assert row == {"prompt": "0 + 1 =", "completion": " 1"}  # "=1" would be one unknown word
    (row,) = task_rows("pretrain", Sums(), tokenizer, 1)
    assert tokenizer(row["text"])["input_ids"] == tokenizer("0 + 1 =")["input_ids"] + [tokenizer.vocab["1"]]


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_a_rejected_completion_is_one_that_the_task_calls_wrong(kind: str, tokenizer: Any) -> None:
    found = list(task_rows(kind, Sums(), tokenizer, 9))
    assert len(found) == 9
    task = Sums()
    for index, row in enumerate(found):
        meta = task.train(index).meta
        assert (task.check(meta, row["chosen"]), task.check(meta, row["rejected"])) == (1.0, 0.0)


def test_a_chat_prompt_stays_messages(tokenizer: Any) -> None:
    class Chat(Sums):
        def train(self, index: int) -> Any:
            messages = [{"role": "user", "content": "hi"}]
            return SimpleNamespace(text=None, messages=messages, meta={"sum": index + 1})

    (row,) = task_rows("sft", Chat(), tokenizer, 1)
    assert row["prompt"] == [{"role": "user", "content": "hi"}]
    assert row["completion"] == [{"role": "assistant", "content": "1"}]


def test_a_task_without_demonstrations_is_told(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no demonstrations, which sft learns from"):
        list(task_rows("sft", Sums(shown=False), tokenizer, 1))


@pytest.mark.parametrize(("size", "count"), [(9, 9), (100, 12), (None, 12)])
def test_a_task_gives_as_many_rows_as_the_run_can_use(size: int | None, count: int, tokenizer: Any) -> None:
    task = Sums()
    task.train_size = size
    assert len(training_rows("sft", config(None, task="sums"), task, tokenizer, "")) == count


# --- what else a user brings


@pytest.mark.parametrize("missing", ["eos", "pad"])
def test_a_tokenizer_without_pad_or_eos_is_told(missing: str, tokenizer: Any) -> None:
    bare = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        **{f"{name}_token": f"<{name}>" for name in ("eos", "pad") if name != missing},
    )
    with pytest.raises(UserError, match=f"the tokenizer has no {missing} token") as error:
        check_tokens(bare, "some/model")
    assert f"model.{missing}_token" in str(error.value)
    check_tokens(tokenizer, "some/model")


def test_callbacks_by_name() -> None:
    assert named_callbacks(["transformers.EarlyStoppingCallback"]) == [transformers.EarlyStoppingCallback]
    assert named_callbacks(["transformers:EarlyStoppingCallback"]) == [transformers.EarlyStoppingCallback]
    with pytest.raises(UserError, match="can't be loaded"):
        named_callbacks(["transformers.NoSuchCallback"])
    with pytest.raises(UserError, match="is not a callback"):
        named_callbacks(["transformers.Trainer"])


def test_settings_that_peft_refuses_are_told() -> None:
    cfg = SimpleNamespace(model=SimpleNamespace(peft={"lora_alph": 4}))
    with pytest.raises(UserError, match="peft's LoraConfig has no argument 'lora_alph'") as error:
        lora(cfg, "sft")
    assert "allowed: lora_alpha" in str(error.value)
    cfg.model.peft = {"r": 4, "layers_to_transform": [0], "target_modules": "q_proj"}
    with pytest.raises(UserError, match=r"peft refuses model\.peft"):
        lora(cfg, "sft")
    cfg.model.peft = {"r": 4, "target_modules": ["q_proj"]}
    assert (lora(cfg, "sft").task_type, lora(cfg, "reward_model").task_type) == ("CAUSAL_LM", "SEQ_CLS")
    cfg.model.peft = {}
    assert lora(cfg, "sft") is None


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("learner.callbacks=[nowhere.Callback]", "the callback nowhere.Callback can't be loaded"),
        ("model.peft.rank=3", "LoraConfig has no argument 'rank'"),
        ("learner.trl.lr_scheduler_type=foo", "SFTConfig refuses its arguments: foo is not a valid"),
    ],
)
def test_wrong_settings_are_told_before_a_model_is_made(
    setting: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=said):
        start("sft", tmp_path, setting)
    assert not (tmp_path / "cache").exists()


def test_what_trls_trainer_refuses_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="TRL's SFTTrainer refuses its settings: Invalid `loss_type` foo"):
        start("sft", tmp_path, "learner.loss_type=foo")


def test_adapters_packing_and_a_callback_by_name_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    run = start(
        "sft", tmp_path, "model.peft.r=4", "model.peft.target_modules=[q_proj,v_proj]",
        "learner.trl.packing=true", "learner.trl.packing_strategy=wrapped", "learner.max_length=32",
        "learner.steps=3", "learner.samples_per_step=8", "learner.samples_per_device_batch=4",
        "learner.callbacks=[tests.trainers.tiny_language.DoubleLoss]",
    )  # fmt: skip
    rows = read_metrics(run.path)
    assert rows[0]["num_tokens"] == 8 * 32  # full rows, without padding
    assert all(row["double_loss"] == 2 * row["loss"] for row in rows)
    assert peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(run.path / "model"), run.path / "model" / "adapter"
    )
