"""The control engine's learner: RLlib's, with one fused update on whole rollouts; see `trainers.ppo`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule

from envs.errors import UserError
from rollouts.collect import GaussianPolicy
from rollouts.trajectories import Rollout
from trainers.normalize import RunningMeanStd
from trainers.ppo import ActorCritics, Columns, gae, mixed_advantage, policy_arrays, ppo_update
from trainers.weights import checksum

UPDATE_STREAM = 2  # first word of the minibatch shuffles' seed, beside rollouts.collect's streams


class ControlModule(TorchRLModule):
    """RLlib's handle on the actor and critics; the learner calls `nets` directly."""

    def setup(self) -> None:
        super().setup()
        self.nets = ActorCritics(**self.model_config)


class ControlLearner(TorchLearner):
    """PPO-Lagrangian's update on whole rollouts, with its normalisers and its optimiser's state."""

    def build(self) -> None:
        super().build()
        control, spec = self.config.control, self.config.env_spec
        self.obs_norm = RunningMeanStd(spec.obs_dim)
        self.reward_norm, self.cost_norm = RunningMeanStd(1), RunningMeanStd(1)
        self.learner_config, self.seed = control.learner, control.run.seed

    @property
    def nets(self) -> ActorCritics:
        return self.module[DEFAULT_MODULE_ID].nets

    def configure_optimizers_for_module(self, module_id, config=None) -> None:
        c, nets = self.config.control.learner, self.module[module_id].nets
        actor = [*nets.actor.parameters(), nets.log_std]
        critics = [p for p in nets.parameters() if not any(p is q for q in actor)]
        groups = [{"params": actor, "lr": c.lr}, {"params": critics, "lr": c.critic_lr}]
        self.optimizer = torch.optim.Adam(groups, eps=1e-5, fused=True)
        self.register_optimizer(module_id=module_id, optimizer=self.optimizer, params=actor + critics)

    def compute_loss_for_module(self, **kwargs):
        """RLlib's per-minibatch hook; `update` replaces the whole path that would call it."""
        raise TypeError("ControlLearner learns by update(rollout=...)")

    def policy(self) -> GaussianPolicy:
        """The current actor as the runners' NumPy copy."""
        arrays = policy_arrays(self.nets, self.obs_norm, self.config.env_spec, self.learner_config)
        return GaussianPolicy(**arrays)

    def update(self, *, rollout: Rollout, augment, costs, multiplier, progress, lr_scale, iteration):
        """One iteration's update in place; returns its statistics.

        costs (T, N) feed the cost critic, or None without one; `augment` adds the cost model's memory to
        normalised observations; `progress` in [0, 1) sets the learning-rate decay.
        Raises UserError when the loss is not finite or when the runners acted under other weights.
        """
        c, policy = self.learner_config, self.policy()
        normalize = policy.normalize
        plain = torch.from_numpy(normalize(rollout.obs))
        inputs = torch.from_numpy(augment(plain.numpy(), rollout.memory))
        final_plain = normalize(rollout.final_obs)
        final_inputs = augment(final_plain, rollout.final_memory)
        if c.normalize_rewards:
            self.reward_norm.update(rollout.rewards[..., None])
        reward_scale = float(self.reward_norm.std[0]) if c.normalize_rewards else 1.0
        nets = self.nets
        advantage, reward_target = self._advantage(
            rollout,
            rollout.rewards / reward_scale,
            nets.reward_critic,
            plain,
            final_plain,
            c.gamma,
            c.gae_lambda,
        )
        cost_advantage = cost_target = None
        if costs is not None:
            if c.normalize_rewards and costs.any():
                self.cost_norm.update(costs[..., None])
            cost_scale = float(self.cost_norm.std[0]) if c.normalize_rewards else 1.0
            cost_advantage, cost_target = self._advantage(
                rollout,
                costs / cost_scale,
                nets.cost_critic,
                inputs,
                final_inputs,
                c.cost_gamma,
                c.cost_gae_lambda,
            )
        mixed = mixed_advantage(advantage, cost_advantage, multiplier, c.standardize_cost_advantage)
        flat_inputs = inputs[:-1].flatten(0, 1).contiguous()
        actions = torch.from_numpy(rollout.actions).flatten(0, 1)
        with torch.no_grad():
            mean = nets.mean(flat_inputs)
            log_prob = nets.log_prob(flat_inputs, actions)
        mismatch = float((mean - torch.from_numpy(rollout.means).flatten(0, 1)).abs().max())
        if mismatch > 1e-3:
            raise UserError(
                f"the env runners acted under other weights than the learner's (iteration {iteration})",
                given=f"largest difference of mean actions {mismatch:.3g}",
                allowed="at most 0.001",
                fix="resume from the last checkpoint; if it comes back, report it with the run's config",
            )
        decay = 1.0 - (1.0 - c.lr_final_fraction) * min(progress, 1.0)
        self.optimizer.param_groups[0]["lr"] = c.lr * decay * lr_scale
        self.optimizer.param_groups[1]["lr"] = c.critic_lr * decay
        before = checksum([p.detach().numpy() for p in nets.parameters()])
        columns = Columns(
            flat_inputs,
            actions,
            log_prob,
            torch.from_numpy(mixed.astype(np.float32)).flatten(),
            torch.from_numpy(reward_target).flatten(),
            None if cost_target is None else torch.from_numpy(cost_target).flatten(),
        )
        generator = torch.Generator().manual_seed(
            int(np.random.default_rng((UPDATE_STREAM, self.seed, iteration)).integers(2**62))
        )
        stats = ppo_update(nets, self.optimizer, columns, c, generator)
        if not np.isfinite(stats["loss"]):
            raise UserError(
                f"the learner's loss is not finite in iteration {iteration}",
                given=str(stats["loss"]),
                fix=f"lower learner.lr ({c.lr}) or learner.critic_lr ({c.critic_lr})",
            )
        moved = checksum([p.detach().numpy() for p in nets.parameters()]) != before
        if not moved and (c.lr > 0 or c.critic_lr > 0):
            raise RuntimeError(f"iteration {iteration} had gradients and a learning rate but moved no weight")
        self.obs_norm.update(rollout.obs[:-1])
        return {**stats, "sampler_mismatch": mismatch, "lr": c.lr * decay * lr_scale}

    @staticmethod
    def _advantage(rollout: Rollout, rewards, critic, inputs, final_inputs, gamma, lam):
        """Advantages and value targets (T, N), float32; time-outs bootstrap from the last state."""
        with torch.no_grad():
            values = critic(inputs)[..., 0].numpy()
            final_values = critic(torch.from_numpy(final_inputs))[..., 0].numpy()
        next_values = values[1:].copy()
        for (t, e), value in zip(rollout.final_index, final_values):
            next_values[t, e] = 0.0 if rollout.terminated[t, e] else value
        advantages = gae(rewards, values[:-1], next_values, rollout.done, gamma, lam)
        return advantages, (advantages + values[:-1]).astype(np.float32)

    def state_tree(self) -> dict[str, Any]:
        """Parameters, optimiser state and normalisers as a checkpoint tree."""
        adam = self.optimizer.state_dict()["state"]
        return {
            "nets": dict(self.nets.state_dict()),
            "adam": {str(i): dict(state) for i, state in adam.items()},
            "obs_norm": self.obs_norm.state_dict(),
            "reward_norm": self.reward_norm.state_dict(),
            "cost_norm": self.cost_norm.state_dict(),
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Undo of `state_tree`; torch checks every shape."""
        self.nets.load_state_dict({k: torch.as_tensor(v) for k, v in tree["nets"].items()})
        full = self.optimizer.state_dict()
        full["state"] = {
            int(i): {k: torch.as_tensor(v) for k, v in state.items()} for i, state in tree["adam"].items()
        }
        self.optimizer.load_state_dict(full)
        for name in ("obs_norm", "reward_norm", "cost_norm"):
            getattr(self, name).load_state_dict(tree[name])
