"""TraCeS: per-step violation credit learned from safe/unsafe labels of whole trajectories and prefixes.

"TraCeS: Learning Per-Timestep Constraint-Violation Credit from Sparse Trajectory-Level Labels"
(arXiv 2504.12557; code released by its authors). The estimator's formulas are the functions of the first
half; `Traces` below them plugs the estimator into the control engine. Where our recipe departs from the
release, the docstring says "ours".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from envs.errors import UserError
from envs.make import EnvConfig
from rewards.human import HumanAnnotator, HumanConfig
from rewards.label_queue import LabelQueue
from rewards.label_server import LabelServer
from rewards.labels import (
    Annotator,
    OracleAnnotator,
    QueryCounter,
    ThresholdOracle,
    prefix_ends,
    whole_is_safe,
)
from rewards.offline import check_offline, load_offline
from rollouts.recorded import LabeledTrajectory
from rollouts.replay import Replay, replay_of
from rollouts.trajectories import EnvSpec, Episode, Rollout
from trainers.control import Constraint, ControlAlgorithm, env_spec
from trainers.gru import gru_sequence
from trainers.multiplier import Multiplier, MultiplierConfig
from trainers.normalize import RunningMeanStd

CREDIT_MAX = 7.0  # one step can lower the log survival by at most this
EXPONENT_MAX = 80.0  # exp(80) is far above every cut and still finite in float32
INPUT_CLIP = 8.0  # of the scaled estimator input, in standard deviations (ours)
LABEL_STREAM, FIT_STREAM, INIT_STREAM, OFFLINE_STREAM = (
    3,
    4,
    5,
    6,
)  # first words of the seed sequences, beside the engine's


# ----------------------------------------------------------------------------------------- the formulas


def lognormal_mean(mu: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """E[-l] = exp(mu + sigma^2 / 2) for the credit l = -exp(mu + sigma eps), cut at CREDIT_MAX."""
    return torch.exp(mu + 0.5 * torch.exp(2 * log_std)).clamp(max=CREDIT_MAX)


def lognormal_var(mu: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """Var[-l] = exp(2 mu + 2 sigma^2) - exp(2 mu + sigma^2), cut at CREDIT_MAX squared.

    Written as exp(2 mu + 2 sigma^2) (1 - exp(-sigma^2)): exact for tiny sigma^2, and no difference of
    infinities for large ones.
    """
    var = torch.exp(2 * log_std)
    second_moment = torch.exp((2 * (mu + var)).clamp(max=EXPONENT_MAX))
    return (second_moment * -torch.expm1(-var)).clamp(max=CREDIT_MAX**2)


def label_loss(total_credit: torch.Tensor, safe: torch.Tensor, class_weight: float = 1.0) -> torch.Tensor:
    """Mean weighted binary cross-entropy of y^ = exp(-S) against y, in log space.

    S = -sum_t l_t >= 0 and y in {0, 1}, both of any one shape: safe costs S, unsafe -log(1 - exp(-S)).
    Weights c/(c+1) for unsafe, 1/(c+1) for safe, scaled to mean 1 over the batch; c = 1 is plain BCE.
    """
    s = total_credit.clamp(min=1e-6)
    return weighted_mean(torch.where(safe > 0.5, s, -torch.log(-torch.expm1(-s))), safe, class_weight)


def weighted_mean(losses: torch.Tensor, safe: torch.Tensor, class_weight: float) -> torch.Tensor:
    """Mean of losses of one shape with `safe`, unsafe ones weighing `class_weight` times as much."""
    weights = torch.where(safe > 0.5, 1.0 / (class_weight + 1.0), class_weight / (class_weight + 1.0))
    return (losses * weights / weights.mean()).mean()


def p_safe(total_credit: np.ndarray | float) -> np.ndarray:
    """P^(no violation) = exp(-S), the product of the per-step survival probabilities exp(l_t)."""
    return np.exp(-np.asarray(total_credit, np.float64))


def uncertainty(credit_mean: np.ndarray, credit_var: np.ndarray) -> float:
    """Coefficient of variation of the sum: sqrt(sum_t Var l_t) / sum_t E l_t."""
    return float(np.sqrt(credit_var.sum(dtype=np.float64)) / (credit_mean.sum(dtype=np.float64) + 1e-8))


@dataclass
class LabelBatch:
    """Labels of the prefixes of a batch of trajectories; an estimator's `loss` reads them."""

    index: tuple[torch.Tensor, torch.Tensor]  # last step and trajectory of every prefix
    labels: torch.Tensor  # of every prefix: 1 safe
    lengths: torch.Tensor  # (B,) steps of the trajectories


class ScaledInput(nn.Module):
    """A network whose inputs go through one fixed affine map and a cut (ours; set by `fit_scaling`)."""

    input_mean: torch.Tensor  # (S + A,)
    input_std: torch.Tensor

    def __init__(self, input_dim: int):
        super().__init__()
        self.register_buffer("input_mean", torch.zeros(input_dim))
        self.register_buffer("input_std", torch.ones(input_dim))

    def fit_scaling(self, inputs: np.ndarray) -> None:
        """Fix the affine input map to zero mean and unit standard deviation over rows (n, S + A)."""
        self.input_mean.copy_(torch.from_numpy(inputs.mean(0)))
        self.input_std.copy_(torch.from_numpy(inputs.std(0) + 1e-3))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Raw inputs (..., S + A) as the network reads them."""
        return ((x - self.input_mean) / self.input_std).clamp(-INPUT_CLIP, INPUT_CLIP)


class Estimator(ScaledInput):
    """The safety-summary-vector model: a GRU over [raw observation; executed action], and a credit decoder.

    The decoder sees the summaries before and after the step, u_t = [h_t; h_{t+1}], because the credit is a
    ratio of two successive survival probabilities. head="lognormal" gives (mu, log sigma); head="point"
    a credit without spread.
    """

    def __init__(self, input_dim: int, config: EstimatorConfig):
        super().__init__(input_dim)
        self.config = config
        self.gru = nn.GRU(input_dim, config.hidden_size, config.layers)
        width = config.decoder_width
        self.decoder = nn.Sequential(
            nn.Linear(2 * config.hidden_size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.location, self.log_scale = nn.Linear(width, 1), nn.Linear(width, 1)
        with torch.no_grad():  # every step starts out as very nearly safe
            if config.head == "lognormal":
                self.location.weight.normal_(-0.5, 0.1)
                self.location.bias.fill_(-5.0)
            else:  # small but above the ReLU's corner, where there would be no gradient (ours)
                self.location.weight.normal_(0.0, 0.005)
                self.location.bias.fill_(0.01)

    @property
    def summary_size(self) -> int:
        """Columns of the memory that the policy may see."""
        return self.config.hidden_size

    def summaries(self, x: torch.Tensor) -> torch.Tensor:
        """Top-layer summaries h_1 ... h_T (T, B, H) of raw inputs (T, B, S + A)."""
        return gru_sequence(self.gru, self.scaled(x))

    def parameters_of_credit(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (T, B, S + A) from the episodes' first steps -> (mu, log sigma), each (T, B).

        With the point head mu is the credit itself and log sigma is -inf.
        """
        after = self.summaries(x)
        before = torch.cat([torch.zeros_like(after[:1]), after[:-1]])
        features = self.decoder(torch.cat([before, after], -1))
        location = self.location(features)[..., 0]
        if self.config.head == "point":
            return location.relu().clamp(max=CREDIT_MAX), torch.full_like(location, -torch.inf)
        mu = (location - self.config.loc_offset).clamp(-20.0, 3.0)
        log_std = (self.log_scale(features)[..., 0] - self.config.log_std_offset).clamp(-20.0, 2.0)
        return mu, log_std

    def sample(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """One reparametrised draw of the violation credits -l_t = exp(mu + sigma eps), (T, B)."""
        mu, log_std = self.parameters_of_credit(x)
        if self.config.head == "point":
            return mu
        eps = torch.randn(mu.shape, generator=generator)
        return torch.exp(mu + torch.exp(log_std) * eps).clamp(max=CREDIT_MAX)

    def credit(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of the violation credits, each (T, B)."""
        mu, log_std = self.parameters_of_credit(x)
        if self.config.head == "point":
            return mu, torch.zeros_like(mu)
        return lognormal_mean(mu, log_std), lognormal_var(mu, log_std)

    def loss(self, x: torch.Tensor, batch: LabelBatch, generator: torch.Generator) -> torch.Tensor:
        """`label_loss` of a batch of trajectories x (T, B, S + A) with one draw of the credits.

        One forward pass gives the losses of all prefixes, because log survival is a cumulative sum.
        """
        credit = self.sample(x, generator)
        return label_loss(torch.cumsum(credit, 0)[batch.index], batch.labels, self.config.class_weight)

    def episode_p_safe(self, total_credit: np.ndarray | float) -> np.ndarray:
        """P_safe of whole episodes from the sums of their mean credits."""
        return p_safe(total_credit)

    def runner(self, memory_norm: RunningMeanStd, version: int, active: bool, visible: bool) -> Any:
        """The cost model that travels to the runners."""
        return SummaryCostModel(self, memory_norm, version, active, visible)


class SummaryCostModel:
    """The estimator as the runners carry it: NumPy, one step at a time, h (n, layers * H) per environment.

    Inactive (before the estimator is trusted) it costs nothing and shows the policy zeros, so the policy
    does not jump when it is switched on.
    """

    def __init__(
        self, estimator: Estimator, memory_norm: RunningMeanStd, version: int, active: bool, visible: bool
    ):
        arrays = {k: v.detach().numpy().copy() for k, v in estimator.state_dict().items()}
        self.layers, self.hidden = estimator.config.layers, estimator.config.hidden_size
        self.point = estimator.config.head == "point"
        self.offsets = (estimator.config.loc_offset, estimator.config.log_std_offset)
        self.arrays, self.version, self.active, self.visible = arrays, version, active, visible
        self.memory_mean = memory_norm.mean.astype(np.float32)
        self.memory_std = memory_norm.std.astype(np.float32)

    def init(self, n: int) -> np.ndarray:
        """Memory of n fresh episodes: zeros (n, layers * H)."""
        return np.zeros((n, self.layers * self.hidden), np.float32)

    def step(self, obs, action, h):
        """Raw observation (n, S), executed action (n, A), h -> mean credit (n,), variance (n,), next h."""
        if not self.active:
            zero = np.zeros(len(obs), np.float32)
            return zero, zero, h
        a = self.arrays
        x = (np.concatenate([obs, action], 1) - a["input_mean"]) / a["input_std"]
        x = np.clip(x, -INPUT_CLIP, INPUT_CLIP)
        size, following = self.hidden, []
        for layer in range(self.layers):
            old = h[:, layer * size : (layer + 1) * size]
            gi = x @ a[f"gru.weight_ih_l{layer}"].T + a[f"gru.bias_ih_l{layer}"]
            gh = old @ a[f"gru.weight_hh_l{layer}"].T + a[f"gru.bias_hh_l{layer}"]
            gates = _sigmoid(gi[:, : 2 * size] + gh[:, : 2 * size])
            reset, update = gates[:, :size], gates[:, size:]
            candidate = np.tanh(gi[:, 2 * size :] + reset * gh[:, 2 * size :])
            x = candidate + update * (old - candidate)
            following.append(x)
        after = np.concatenate(following, 1)
        u = np.concatenate([h[:, -size:], x], 1)
        for i in (0, 2):
            u = np.maximum(u @ a[f"decoder.{i}.weight"].T + a[f"decoder.{i}.bias"], 0.0)
        location = u @ a["location.weight"][0] + a["location.bias"][0]
        if self.point:
            return np.clip(location, 0.0, CREDIT_MAX), np.zeros_like(location), after
        mu = np.clip(location - self.offsets[0], -20.0, 3.0)
        log_std = u @ a["log_scale.weight"][0] + a["log_scale.bias"][0] - self.offsets[1]
        var = np.exp(2.0 * np.clip(log_std, -20.0, 2.0))
        mean = np.exp(mu + 0.5 * var)
        spread = np.exp(np.minimum(2.0 * (mu + var), EXPONENT_MAX)) * -np.expm1(-var)
        return np.minimum(mean, CREDIT_MAX), np.minimum(spread, CREDIT_MAX**2), after

    def augment(self, obs: np.ndarray, h: np.ndarray) -> np.ndarray:
        """[obs; top summary], the summary in running standard deviations, clipped to +-5.

        Just obs when the policy is not to see the memory.
        """
        if not self.visible:
            return obs
        top = h[..., -self.hidden :]
        shown = np.clip((top - self.memory_mean) / self.memory_std, -5.0, 5.0) * np.float32(self.active)
        return np.concatenate([obs, shown.astype(np.float32)], -1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


# ------------------------------------------------------------------------------------------ the settings


@dataclass(kw_only=True)
class EstimatorConfig:
    """Shape and training of the violation estimator. Counts of updates are minibatches."""

    head: str = "lognormal"  # lognormal | point
    hidden_size: int = 8
    layers: int = 1
    decoder_width: int = 32
    loc_offset: float = 0.0
    log_std_offset: float = 1.0
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    class_weight: float = 3.0  # of unsafe labels, see `label_loss`; the release uses 1 (ours)
    batch_trajectories: int = 64
    pretrain_updates: int = 600
    pretrain_lr: float = 3e-3
    retrain_updates: int = 25
    retrain_lr: float = 2e-3
    recent_labels: int = 96  # half of a retraining batch comes from the newest labels
    held_out_every: int = 6  # every n-th labelled trajectory is never trained on


@dataclass(kw_only=True)
class TracesConfig:
    """Constraint: P(an episode stays inside a limit nobody told us) >= p_safe_limit, from labels alone.

    `budget` and `noise` belong to the simulated annotator (and to the observer's plots); the learner sees
    neither, nor the cost.
    """

    name: str = "traces"
    budget: float = 25.0
    noise: float = 0.0
    slice_steps: int = 10  # a prefix is labelled every so many steps
    p_safe_limit: float = 0.9
    multiplier: MultiplierConfig = field(default_factory=lambda: MultiplierConfig(init=1.5, lr=0.2))
    slack_scale: float = 0.05  # of the violation when the constraint holds, in units of 1 - limit (ours)
    window_episodes: int = 32  # latest episodes whose P_safe is compared with the limit
    bias_labels: int = 16  # latest random labels that correct P_safe; 0: no correction (ours)
    warmup_labels: int = 2  # random trajectories an iteration while lambda is 0
    start_unsafe_share: float = 0.5  # of the last `start_window` labels; then the estimator is fitted
    start_window: int = 8
    start_labels: int = 48  # more labels from the last `start_iterations` iterations, at the start
    start_iterations: int = 6
    gate_safe: float = 0.8  # held-out safe trajectories must reach this mean P_safe (times 1 - noise)
    gate_unsafe: float = 0.6  # and held-out unsafe ones stay under this
    gate_tries: int = 3  # then the constraint starts anyway, and the run says so
    query_fraction: float = 0.25  # of the pool, once that is at least `query_min` trajectories
    query_min: int = 4
    query_uncertain_share: float = 0.5  # by coefficient of variation; the rest at random
    lr_scale_active: float = 0.5  # actor's learning rate once the constraint is active
    label: str = "oracle"  # who labels: oracle (simulated) | human (clips on a local page or in a terminal)
    human: HumanConfig = field(default_factory=HumanConfig)
    offline: str | None = None  # labelled trajectories to pretrain on: our recording, or DSRL's HDF5
    memory_in_policy: bool = True
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)


# Smaller values crash later, or silently never label, train or constrain anything.
LEAST = {
    "slack_scale": 0,
    "window_episodes": 1,
    "bias_labels": 0,
    "warmup_labels": 1,
    "start_window": 1,
    "start_labels": 0,
    "start_iterations": 1,
    "gate_tries": 1,
    "query_min": 1,
    "lr_scale_active": 0,
}
LEAST_ESTIMATOR = {
    "hidden_size": 1,
    "layers": 1,
    "decoder_width": 1,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "batch_trajectories": 2,  # half of a batch is the newest labels, half all of them
    "pretrain_updates": 1,
    "pretrain_lr": 0,
    "retrain_updates": 1,
    "retrain_lr": 0,
    "recent_labels": 1,
    "held_out_every": 2,
}


# --------------------------------------------------------------------------------------- the algorithm


@dataclass
class Trajectory:
    """One episode as the estimator and an annotator see it. `costs` are for the oracle alone."""

    inputs: np.ndarray  # (L, S + A) float32: raw observation, executed action
    costs: np.ndarray  # (L,)
    terminated: bool
    uncertainty: float = 0.0
    p_safe: float = 1.0
    replay: Replay | None = None  # for a person to see


@dataclass
class Labeled:
    """A trajectory with the labels of its prefixes; the last one is for the whole."""

    inputs: np.ndarray  # (L, S + A)
    ends: np.ndarray  # (K,) steps
    labels: np.ndarray  # (K,) 1 safe


class Traces(ControlAlgorithm):
    """PPO-Lagrangian whose cost is the learned credit and whose constraint is E[P_safe] >= limit.

    Warm-up: lambda is 0 and a few random episodes are labelled each iteration, until both classes are
    there in number; then the estimator is fitted and the constraint goes active. Active: lambda follows
    limit - P_safe, a share of the pool is labelled (most uncertain and random), the estimator is retrained
    with replay, and the new version reaches the runners with the next weights.
    """

    Config = TracesConfig
    constrained = True
    headline = (("P_safe", "p_safe"), ("multiplier", "multiplier"), ("labels", "labels_used"))

    def __init__(self, config: TracesConfig, spec: EnvSpec, seed: int):
        super().__init__(config, spec, seed)
        self.oracle = ThresholdOracle(config.budget, config.noise)
        self.annotator: Annotator = OracleAnnotator(self.oracle, config.slice_steps)
        self.multiplier = Multiplier(config.multiplier)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(np.random.default_rng((INIT_STREAM, seed)).integers(2**62)))
            self.estimator = self.make_estimator(spec)
        self.memory_dim = self.estimator.summary_size if config.memory_in_policy else 0
        self.optimizer = torch.optim.AdamW(
            self.estimator.parameters(), weight_decay=config.estimator.weight_decay
        )
        self.memory_norm = RunningMeanStd(self.estimator.summary_size)
        self.active, self.version, self.gate_failures = False, 0, 0
        self.labeled: list[Labeled] = []
        self.offline_count = 0  # how many of them came from a file
        self.queries = QueryCounter()
        self.pool: list[Trajectory] = []  # not yet labelled
        self._recent: deque[float] = deque(maxlen=config.window_episodes)
        self._bias: deque[float] = deque(maxlen=max(1, config.bias_labels))  # label - P_safe, random labels
        self._notices: list[str] = []
        self._page: LabelServer | None = None
        self._refresh()

    def make_estimator(self, spec: EnvSpec) -> Any:
        """What learns from the labels; see `Estimator` for what is asked of it."""
        return Estimator(spec.obs_dim + spec.action_dim, self.config.estimator)

    @classmethod
    def check(cls, cfg: Any) -> None:
        c = cfg.algo
        ThresholdOracle(c.budget, c.noise)
        if not 0 < c.p_safe_limit < 1:
            raise UserError("algo.p_safe_limit is a probability", given=c.p_safe_limit, allowed="(0, 1)")
        if c.noise and c.p_safe_limit >= 1 - c.noise:
            raise UserError(
                "with this label noise a calibrated estimator can never reach the P_safe limit",
                given=f"algo.noise={c.noise:g}, algo.p_safe_limit={c.p_safe_limit:g}",
                allowed=f"a limit below 1 - noise = {1 - c.noise:g}",
                fix=f"set algo.p_safe_limit={max(0.1, round(0.9 * (1 - c.noise), 2)):g}",
            )
        if c.slice_steps < 1 or c.slice_steps > cfg.env.horizon:
            raise UserError(
                "the prefix slice must fit into an episode",
                given=f"algo.slice_steps={c.slice_steps}, env.horizon={cfg.env.horizon}",
                allowed=f"1 to {cfg.env.horizon}",
                fix=f"set algo.slice_steps={max(1, cfg.env.horizon // 25)}",
            )
        if c.estimator.head not in ("lognormal", "point"):
            raise UserError("unknown estimator head", given=c.estimator.head, allowed=("lognormal", "point"))
        for name in ("query_fraction", "query_uncertain_share", "start_unsafe_share"):
            if not 0 <= getattr(c, name) <= 1:
                raise UserError(f"algo.{name} is a share", given=getattr(c, name), allowed="[0, 1]")
        for section, settings, least in (
            ("algo", c, LEAST),
            ("algo.estimator", c.estimator, LEAST_ESTIMATOR),
        ):
            for name, low in least.items():
                if not getattr(settings, name) >= low:  # also catches NaN
                    raise UserError(
                        f"{section}.{name} is too small",
                        given=getattr(settings, name),
                        allowed=f"at least {low:g}",
                    )
        for name, value in (
            ("algo.query_fraction", c.query_fraction),
            ("algo.estimator.class_weight", c.estimator.class_weight),
        ):
            if not value > 0:
                raise UserError(f"{name} must be more than 0", given=value, allowed="(0, inf)")
        if c.label not in ("oracle", "human"):
            raise UserError("unknown algo.label", given=c.label, allowed=("oracle", "human"))
        c.human.check()
        if c.offline is not None:
            read_offline(c, env_spec(cfg), cfg.run.seed)

    @classmethod
    def needs_cost(cls, cfg: Any) -> bool:
        """A person needs no cost of the environment's to label; the simulated annotator does."""
        return cfg.algo.label == "oracle"

    @classmethod
    def describe(cls, cfg: Any) -> list[str]:
        c = cfg.algo
        prefixes = len(prefix_ends(cfg.env.horizon, c.slice_steps))
        truly = (c.p_safe_limit - c.noise) / (1 - 2 * c.noise)  # P_safe is that of the label, flips included
        meaning = f", so {truly:.0%} truly safe episodes" if c.noise else ""
        hidden = f"hidden limit: {c.budget:g} cost an episode, told to the annotator only"
        if c.label == "human":
            hidden = "a person labels clips of episodes, and the run waits for the answers"
        return [
            f"{hidden}; constraint E[P_safe] >= {c.p_safe_limit:g}{meaning}",
            f"{prefixes} labels a trajectory (a prefix every {c.slice_steps} steps), noise {c.noise:g}",
        ]

    def begin(self, run: Any, resumed: bool) -> None:
        """Open the page for labels if people give them; pretrain on offline trajectories if there are any.

        The constraint is active at once if the gate is passed.
        """
        c = self.config
        if c.label == "human":
            self._open_page(run)
        if resumed or c.offline is None:
            return
        found = read_offline(c, self.spec, self.seed)
        self.labeled = [
            Labeled(np.concatenate([t.obs, t.actions], 1), t.ends, t.labels.astype(np.float32)) for t in found
        ]
        self.offline_count = len(found)
        self.estimator.fit_scaling(np.concatenate([x.inputs for x in self.labeled]))
        e = c.estimator
        loss = self._fit(e.pretrain_updates, e.pretrain_lr, 0.0, 0, stream=OFFLINE_STREAM)
        unsafe = sum(x.labels[-1] == 0 for x in self.labeled)
        self._notices.append(
            f"pretrained on {len(found)} trajectories of {c.offline} ({unsafe} unsafe), loss {loss:.3f}"
        )
        self._pass_gate(tries=None)
        self._refresh()

    def _open_page(self, run: Any) -> None:
        folder, obs_dim = run.path / "labels", self.spec.obs_dim
        env, c = EnvConfig(**run.config["env"]), self.config
        self._page = LabelServer(LabelQueue(folder), c.human.host, c.human.port)
        where = f"{self._page.url} (or: python launch/label.py run={run.path})"
        self.annotator = HumanAnnotator(
            folder, env, obs_dim, c.slice_steps, c.human, run.event, run.should_stop, where
        )
        run.event(f"a person labels this run, at {where}")

    def end(self) -> None:
        """Close the page for labels."""
        if self._page is not None:
            self._page.stop()
            self._page = None

    def constrain(self, rollout: Rollout) -> Constraint:
        """Step the multiplier by limit - P_safe; the learned mean credits are the costs."""
        if not self.active:
            return Constraint(np.zeros(rollout.shape, np.float32), 0.0)
        sums = rollout.episode_sums(rollout.model_cost, rollout.episodes())
        self._recent.extend(self.estimator.episode_p_safe(sums))
        if self._recent:
            self.multiplier.update(self._violation())
        return Constraint(rollout.model_cost, self.multiplier.value)

    def corrected_p_safe(self) -> float:
        """Mean P_safe of the recent episodes plus mean (label - P_safe) of the recent random labels (ours).

        The policy is optimised against the estimator and drifts to where it is too hopeful; labels chosen
        at random measure that bias without one of their own. At least 8 are needed.
        """
        bias = float(np.mean(self._bias)) if self.config.bias_labels and len(self._bias) >= 8 else 0.0
        return float(np.clip(np.mean(self._recent) + bias, 0.0, 1.0))

    def _violation(self) -> float:
        """What the multiplier follows: positive while P_safe misses the limit."""
        missing = self.config.p_safe_limit - self.corrected_p_safe()
        if missing >= 0:
            return missing
        return missing / (1.0 - self.config.p_safe_limit) * self.config.slack_scale

    def after_step(self, rollout: Rollout, hidden_costs: np.ndarray, iteration: int) -> dict[str, Any]:
        """Label, fit, and renew what the runners carry. See the class for the two phases."""
        episodes = rollout.episodes()
        fresh = [self._trajectory(rollout, hidden_costs, e, iteration) for e in episodes]
        self.pool += fresh
        rng = np.random.default_rng((LABEL_STREAM, self.seed, iteration))
        loss = None
        if self.active:
            if size := self.estimator.summary_size:
                self.memory_norm.update(rollout.memory[..., -size:])
            loss = self._query_and_retrain(rng, iteration)
        else:
            loss = self._warm_up(rng, iteration, len(fresh))
        self._refresh()
        return self._metrics(fresh, loss)

    def _trajectory(self, rollout: Rollout, costs: np.ndarray, e: Episode, iteration: int) -> Trajectory:
        at = (slice(e.start, e.end), e.env)
        inputs = np.concatenate([rollout.obs[:-1][at], rollout.executed[at]], -1)
        mean, var = rollout.model_cost[at], rollout.model_cost_var[at]
        score = float(self.estimator.episode_p_safe(mean.sum()))
        replay = replay_of(rollout, e, self.seed, iteration) if self.config.label == "human" else None
        doubt = self._doubt(inputs, mean, var, score)
        return Trajectory(inputs, costs[at], e.terminated, doubt, score, replay)

    def _doubt(self, inputs: np.ndarray, mean: np.ndarray, var: np.ndarray, score: float) -> float:
        """How much a label of this episode would tell; the share of queries by doubt takes the largest."""
        return uncertainty(mean, var)

    # -- labels

    def _label(self, trajectories: list[Trajectory], rng: np.random.Generator) -> list[float | None]:
        """Have the trajectories labelled; the labels of the wholes, None where the annotator gave none."""
        wholes: list[float | None] = []
        for trajectory, judged in zip(trajectories, self.annotator.label(trajectories, rng), strict=True):
            if judged is None:
                wholes.append(None)
                continue
            ends, labels = judged
            self.queries.add(labels)
            self.labeled.append(Labeled(trajectory.inputs, ends, labels))
            wholes.append(float(labels[-1]))
        return wholes

    def _take(self, indices: np.ndarray) -> list[Trajectory]:
        """Remove trajectories from the pool, in the order given."""
        taken = [self.pool[i] for i in indices]
        gone = {int(i) for i in indices}
        self.pool = [t for i, t in enumerate(self.pool) if i not in gone]
        return taken

    def _warm_up(self, rng: np.random.Generator, iteration: int, fresh: int) -> float | None:
        c = self.config
        newest = np.arange(len(self.pool) - fresh, len(self.pool))
        self._label(self._take(rng.choice(newest, min(c.warmup_labels, fresh), replace=False)), rng)
        self.pool = self.pool[-(c.start_iterations * max(1, fresh)) :]
        whole = [x.labels[-1] for x in self.labeled[self.offline_count :]]
        recent = whole[-c.start_window :]
        if len(recent) < c.start_window or 1.0 - np.mean(recent) < c.start_unsafe_share:
            if len(set(whole)) < 2 and iteration % 20 == 19:
                state = "safe" if whole and whole[0] else "unsafe"
                self._notices.append(
                    f"all {len(whole)} labels so far say {state}: nothing to learn a limit from yet; "
                    "labelling goes on, the multiplier stays 0"
                )
            return None
        extra = rng.choice(len(self.pool), min(c.start_labels, len(self.pool)), replace=False)
        self._label(self._take(extra), rng)
        if not self._both_classes():
            return None
        if self.gate_failures == 0:
            self.estimator.fit_scaling(np.concatenate([x.inputs for x in self.labeled]))
        loss = self._fit(c.estimator.pretrain_updates, c.estimator.pretrain_lr, 0.0, iteration)
        self._pass_gate(c.gate_tries)
        return loss

    def _both_classes(self) -> bool:
        return len({float(x.labels[-1]) for x in self.labeled}) == 2

    def _pass_gate(self, tries: int | None) -> None:
        """Go active if the held-out trajectories are scored as labelled, or after the last of `tries`."""
        c, scores = self.config, self.held_out_scores()
        safe, unsafe = scores["safe"], scores["unsafe"]
        good = (safe is None or safe >= c.gate_safe * (1 - c.noise)) and (
            unsafe is None or unsafe <= c.gate_unsafe
        )
        self.gate_failures += not good
        text = f"held-out P_safe: {_show(safe)} on safe, {_show(unsafe)} on unsafe trajectories"
        if not good and (tries is None or self.gate_failures < tries):
            self._notices.append(f"calibration gate not passed ({text}); more labels, then another try")
            return
        self._notices.append(
            f"constraint active after {len(self.labeled)} labelled trajectories; {text}"
            + ("" if good else f"; the gate was not passed in {tries} tries")
        )
        self.active, self.lr_scale, self.pool = True, c.lr_scale_active, []
        if self.estimator.summary_size:
            for x in self.labeled:
                self.memory_norm.update(self._summaries(x.inputs))

    def _summaries(self, inputs: np.ndarray) -> np.ndarray:
        """Top summaries (L, H) along one trajectory."""
        with torch.no_grad():
            return self.estimator.summaries(torch.from_numpy(inputs)[:, None])[:, 0].numpy()

    def _query_and_retrain(self, rng: np.random.Generator, iteration: int) -> float | None:
        c = self.config
        wanted = int(np.ceil(c.query_fraction * len(self.pool)))
        if wanted < c.query_min or wanted == 0:
            return None
        n_random = wanted - round(wanted * c.query_uncertain_share)
        # First: a sample of all episodes, because these labels measure the estimator's bias on all of them.
        at_random = rng.choice(len(self.pool), n_random, replace=False)
        by_cv = np.argsort([-t.uncertainty for t in self.pool], kind="stable")
        uncertain = by_cv[~np.isin(by_cv, at_random)][: wanted - n_random]
        chosen = self._take(np.concatenate([at_random, uncertain]))
        wholes = self._label(chosen, rng)
        for trajectory, whole in zip(chosen[:n_random], wholes[:n_random], strict=True):
            if whole is not None:
                self._bias.append(whole - trajectory.p_safe)
        self.pool = []
        return self._fit(c.estimator.retrain_updates, c.estimator.retrain_lr, 0.5, iteration)

    # -- the fit

    def _fit(
        self, updates: int, lr: float, recent_share: float, iteration: int, stream: int = FIT_STREAM
    ) -> float:
        """`updates` AdamW steps on the estimator's loss; a share of each batch comes from the newest labels.

        Returns the mean loss of the last 20 updates. Raises UserError when the loss is not finite.
        """
        e = self.config.estimator
        rng = np.random.default_rng((stream, self.seed, iteration))
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        everything = self._training_indices(0)
        recent = self._training_indices(len(self.labeled) - e.recent_labels)
        n_recent = min(len(recent), int(e.batch_trajectories * recent_share))
        n_all = min(len(everything), e.batch_trajectories - n_recent)
        losses: list[float] = []
        for _ in range(updates):
            chosen = np.concatenate(
                [rng.choice(recent, n_recent, replace=False), rng.choice(everything, n_all, replace=False)]
            ).astype(int)
            x, batch = _pad([self.labeled[i] for i in chosen])
            loss = self.estimator.loss(x, batch, generator)
            if not torch.isfinite(loss):
                raise UserError(
                    f"the estimator's loss is not finite in iteration {iteration}",
                    given=str(float(loss)),
                    fix=f"lower algo.estimator.retrain_lr ({e.retrain_lr}) or check the observations",
                )
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.estimator.parameters(), e.max_grad_norm)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        self.version += 1
        return float(np.mean(losses[-20:]))

    def _training_indices(self, start: int) -> np.ndarray:
        every = self.config.estimator.held_out_every
        return np.array([i for i in range(max(0, start), len(self.labeled)) if i % every != every - 1], int)

    def held_out_scores(self) -> dict[str, float | None]:
        """Mean P_safe of the newest 60 held-out trajectories, by the label of the whole; None without any."""
        every = self.config.estimator.held_out_every
        held = [x for i, x in enumerate(self.labeled) if i % every == every - 1][-60:]
        scores: dict[str, list[float]] = {"safe": [], "unsafe": []}
        with torch.no_grad():
            for x in held:
                credit, _ = self.estimator.credit(torch.from_numpy(x.inputs)[:, None])
                score = self.estimator.episode_p_safe(float(credit.sum()))
                scores["safe" if x.labels[-1] else "unsafe"].append(float(score))
        return {k: float(np.mean(v)) if v else None for k, v in scores.items()}

    def _refresh(self) -> None:
        """Renew the version that the next weights carry."""
        self.cost_model = self.estimator.runner(
            self.memory_norm, self.version, self.active, self.config.memory_in_policy
        )

    def _metrics(self, fresh: list[Trajectory], loss: float | None) -> dict[str, Any]:
        scores: dict[bool, list[float]] = {True: [], False: []}
        for t in fresh if self.config.label == "oracle" else []:  # what a person finds safe is not known here
            scores[whole_is_safe(t.costs, t.terminated, self.config.budget)].append(t.p_safe)
        safe, unsafe = scores[True], scores[False]
        return {
            "p_safe": float(np.mean([t.p_safe for t in fresh])) if self.active and self._recent else None,
            "p_safe_corrected": self.corrected_p_safe() if self.active and self._recent else None,
            "p_safe_when_safe": float(np.mean(safe)) if self.active and safe else None,
            "p_safe_when_unsafe": float(np.mean(unsafe)) if self.active and unsafe else None,
            "constraint_active": int(self.active),
            "labels_used": self.queries.trajectories,
            "queries_code": self.queries.code,
            "queries_minimal": self.queries.minimal,
            "estimator_loss": loss,
            "estimator_version": self.version,
        }

    def notices(self) -> list[str]:
        said, self._notices = self._notices, []
        return said

    # -- everything that must survive a restart

    def state_dict(self) -> dict[str, Any]:
        """See `ControlAlgorithm.state_dict`. Generators are seeded by iteration, so none is kept."""
        adam = self.optimizer.state_dict()["state"]
        return {
            "estimator": dict(self.estimator.state_dict()),
            "adamw": {str(i): dict(s) for i, s in adam.items()},
            "memory_norm": self.memory_norm.state_dict(),
            "multiplier": self.multiplier.state_dict(),
            "phase": {
                "active": self.active,
                "version": self.version,
                "gate_failures": self.gate_failures,
                "offline": self.offline_count,
                "lr_scale": self.lr_scale,
            },
            "queries": vars(self.queries).copy(),
            "recent_p_safe": list(self._recent),
            "bias": list(self._bias),
            "labeled": {
                "inputs": _stack([x.inputs for x in self.labeled]),
                "lengths": np.array([len(x.inputs) for x in self.labeled], np.int64),
                "ends": _stack([x.ends for x in self.labeled]),
                "labels": _stack([x.labels for x in self.labeled]),
                "counts": np.array([len(x.ends) for x in self.labeled], np.int64),
            },
            "pool": {
                "inputs": _stack([t.inputs for t in self.pool]),
                "costs": _stack([t.costs for t in self.pool]),
                "lengths": np.array([len(t.costs) for t in self.pool], np.int64),
                "terminated": np.array([t.terminated for t in self.pool], bool),
                "uncertainty": np.array([t.uncertainty for t in self.pool], np.float64),
                "p_safe": np.array([t.p_safe for t in self.pool], np.float64),
                **_replay_state(self.pool),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimator.load_state_dict({k: torch.as_tensor(v) for k, v in state["estimator"].items()})
        full = self.optimizer.state_dict()
        full["state"] = {
            int(i): {k: torch.as_tensor(v) for k, v in s.items()} for i, s in state["adamw"].items()
        }
        self.optimizer.load_state_dict(full)
        self.memory_norm.load_state_dict(state["memory_norm"])
        self.multiplier.load_state_dict(state["multiplier"])
        phase = state["phase"]
        self.active, self.version, self.lr_scale = phase["active"], phase["version"], phase["lr_scale"]
        self.gate_failures, self.offline_count = phase["gate_failures"], phase["offline"]
        self.queries = QueryCounter(**state["queries"])
        self._recent.extend(state["recent_p_safe"])
        self._bias.extend(state["bias"])
        known, pool = state["labeled"], state["pool"]
        self.labeled = [
            Labeled(*parts)
            for parts in zip(
                _split(known["inputs"], known["lengths"]),
                _split(known["ends"], known["counts"]),
                _split(known["labels"], known["counts"]),
                strict=True,
            )
        ]
        self.pool = [
            Trajectory(inputs, costs, bool(terminated), float(cv), float(p), replay)
            for inputs, costs, terminated, cv, p, replay in zip(
                _split(pool["inputs"], pool["lengths"]),
                _split(pool["costs"], pool["lengths"]),
                pool["terminated"],
                pool["uncertainty"],
                pool["p_safe"],
                _replays(pool),
                strict=True,
            )
        ]
        self._refresh()


def read_offline(c: TracesConfig, spec: EnvSpec, seed: int) -> list[LabeledTrajectory]:
    """The trajectories of `algo.offline`, which fit this environment and hold both classes, or UserError."""
    assert c.offline is not None
    oracle, rng = ThresholdOracle(c.budget, c.noise), np.random.default_rng((OFFLINE_STREAM, seed))
    found = load_offline(c.offline, c.slice_steps, oracle, rng)
    sizes = {"obs_dim": spec.obs_dim, "action_dim": spec.action_dim, "horizon": spec.horizon}
    check_offline(found, path=c.offline, slice_steps=c.slice_steps, **sizes)
    return found


def _pad(batch: list[Labeled]) -> tuple[torch.Tensor, LabelBatch]:
    """Ragged trajectories as (T, B, S + A), with the labels of their prefixes."""
    lengths = [len(x.inputs) for x in batch]
    longest = max(lengths)
    x = np.zeros((longest, len(batch), batch[0].inputs.shape[1]), np.float32)
    for b, item in enumerate(batch):
        x[: len(item.inputs), b] = item.inputs
    steps = np.concatenate([item.ends - 1 for item in batch])
    columns = np.repeat(np.arange(len(batch)), [len(item.ends) for item in batch])
    labels = np.concatenate([item.labels for item in batch])
    index = torch.from_numpy(steps), torch.from_numpy(columns)
    return torch.from_numpy(x), LabelBatch(index, torch.from_numpy(labels), torch.tensor(lengths))


def _replay_state(pool: list[Trajectory]) -> dict[str, np.ndarray]:
    """What is needed to show the pool's episodes to a person; nothing without one."""
    replays = [t.replay for t in pool if t.replay is not None]
    if not replays:
        return {}
    return {
        "replay_seed": np.array([r.seed for r in replays], np.int64),
        "replay_start": np.array([r.start for r in replays], np.int64),
        "replay_lengths": np.array([len(r.actions) for r in replays], np.int64),
        "replay_actions": _stack([r.actions for r in replays]),
    }


def _replays(pool: dict[str, np.ndarray]) -> list[Replay | None]:
    """Undo of `_replay_state`."""
    if "replay_seed" not in pool:
        return [None] * len(pool["lengths"])
    actions = _split(pool["replay_actions"], pool["replay_lengths"])
    return [
        Replay(seed=int(seed), start=int(start), actions=taken)
        for seed, start, taken in zip(pool["replay_seed"], pool["replay_start"], actions, strict=True)
    ]


def _stack(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _split(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _show(value: float | None) -> str:
    return "none held out" if value is None else f"{value:.2f}"
