"""The heavy half of the language engine: a run's pool, Feed and policy learner. Loads torch and TRL."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import transformers

from rollouts.engine import OTHER_ARITHMETIC, EngineSpec
from rollouts.pool import RolloutPool
from trainers.feed import Feed, FeedConfig
from trainers.feed_remote import remote_feed
from trainers.learner_mixin import Seams
from trainers.learners import check_tokens, lora, named_callbacks, quiet
from trainers.models import load_model, load_tokenizer
from trainers.placement import WorkerContext, backend_arguments
from trainers.policy import PolicyLearner, PolicySettings, scores_as_drawn
from trainers.trl_arguments import loss_settings, trl_config

if TYPE_CHECKING:
    from trainers.run import Run

STORE_BYTES = 1 << 30  # of a cluster started here: two versions of the weights on their way


def feed_for(cfg: Any, run: Run, task: Any, model_path: str, stack: ExitStack) -> Any:
    """The run's Feed with its pool, in this process or, for learners in other processes, in an actor.

    `stack` ends them. Raises UserError when the model cannot do what the config asks.
    """
    from trainers.language import sampling

    r, c = cfg.rollout, cfg.learner
    tokenizer = load_tokenizer(model_path, cfg.model)
    check_tokens(tokenizer, model_path)
    if r.num_workers or c.num_workers:
        from trainers.ray_cluster import local_cluster

        stack.enter_context(local_cluster(r.num_workers + c.num_workers, STORE_BYTES))
    spec = EngineSpec(
        model_path=model_path,
        kind=r.engine,
        dtype=cfg.model.dtype,
        deterministic=cfg.run.deterministic,
        options=dict(r.options),
    )
    pool = RolloutPool(spec, num_workers=r.num_workers, deadline_s=r.deadline_s, max_restarts=r.max_restarts)
    stack.callback(pool.close)
    algorithm = cfg.algorithm(cfg.algo, cfg.run.seed)
    algorithm.prepare(cfg, tokenizer)
    feed_cfg = FeedConfig(
        seed=cfg.run.seed,
        batches=-(-c.steps // c.num_iterations),  # of the plan, wherever run.max_steps stops this time
        prompts=r.prompts_per_step,
        samples=r.samples_per_prompt,
        params=replace(sampling(cfg), stop_ids=(tokenizer.eos_token_id,)),
        staleness=r.staleness,
        max_failure_rate=cfg.reward.max_failure_rate,
        scale_rewards=cfg.reward.scale,
        mask_cut=r.mask_cut,
        steps_per_batch=c.num_iterations,
        samples_path=str(run.path / "samples.jsonl"),
    )
    rewards = algorithm.rewards(cfg, task)
    if c.num_workers == 0:
        feed: Any = Feed(feed_cfg, task, tokenizer, pool, rewards, algorithm)
    else:
        deadline_s = (r.staleness + 2) * r.deadline_s + cfg.reward.deadline_s  # all that may be in line
        feed = remote_feed(feed_cfg, task, tokenizer, pool.handle(), rewards, algorithm, deadline_s)
    stack.callback(feed.close)
    return feed


@dataclass(kw_only=True)
class PolicyMaker:
    """Makes the policy's learner in a worker; picklable when the Feed is remote."""

    cfg: Any
    model_path: str
    feed: Any

    def __call__(self, context: WorkerContext) -> PolicyLearner:
        from trainers.language import learning_rate, step_rows, world

        quiet()
        cfg = self.cfg
        r, c = cfg.rollout, cfg.learner
        tokenizer = load_tokenizer(self.model_path, cfg.model)
        accumulation = step_rows(cfg) // (world(cfg) * c.samples_per_device_batch)
        args = trl_config(
            "policy",
            c.trl,
            output_dir=context.scratch,
            max_steps=c.steps,
            max_grad_norm=c.max_grad_norm,
            per_device_train_batch_size=c.samples_per_device_batch,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=accumulation,
            num_generations=r.samples_per_prompt,
            max_completion_length=r.max_new_tokens,
            temperature=r.temperature,
            seed=cfg.run.seed,
            save_steps=cfg.run.checkpoint_every,
            gradient_checkpointing=cfg.model.gradient_checkpointing,
            shuffle_dataset=False,
            **learning_rate(cfg),
            **backend_arguments(cfg),
            **loss_settings("policy", c),
        )
        transformers.set_seed(cfg.run.seed)
        algorithm = cfg.algorithm(cfg.algo, cfg.run.seed)
        algorithm.prepare(cfg, tokenizer)
        narrow = cfg.model.dtype != "float32" or args.bf16 or args.fp16
        exact = (
            r.engine in ("transformers", algorithm.engine_kind)
            and not narrow
            and r.top_p == 1
            and r.top_k == 0
        )
        return PolicyLearner(
            model=load_model(self.model_path, cfg.model),
            args=args,
            train_dataset=tickets(),
            processing_class=tokenizer,
            peft_config=lora(cfg, "policy"),
            callbacks=named_callbacks(c.callbacks),
            feed=self.feed,
            algorithm=algorithm,
            settings=PolicySettings(
                iterations=c.num_iterations,
                correct=r.staleness > 0 or r.engine in OTHER_ARITHMETIC,
                weight_cap=r.off_policy_cap,
                exact=exact and scores_as_drawn(algorithm.likelihood),
            ),
            context=context,
            seams=Seams(
                compose=algorithm.compose,
                aggregate=algorithm.aggregate,
                after_step=algorithm.after_step,
                stop_after=cfg.run.max_steps,
            ),
        )


def tickets() -> Any:
    """What TRL wants to see as a dataset; its rows are never read."""
    import datasets

    return datasets.Dataset.from_dict({"prompt": ["-"]})
