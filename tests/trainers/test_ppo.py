"""PPO's mathematics: advantages by their definition, one update against its numerical gradient."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollouts.collect import GaussianPolicy
from tests.reference import ppo as reference
from tests.reference.gae import gae_of_episode
from trainers.control import LearnerConfig
from trainers.normalize import RunningMeanStd
from trainers.ppo import ActorCritics, Columns, gae, mixed_advantage, policy_arrays, ppo_update

OBS, MEMORY, ACTIONS, ROWS = 3, 2, 2, 12


# -- advantages


def test_gae_by_hand() -> None:
    # gamma = lam = 0.5. delta = r + V'/2 - V: 1 + 1 - 1 = 1, 2 + 2 - 2 = 2, 3 + 0 - 4 = -1 (terminated).
    values = np.array([[1.0], [2.0], [4.0]])
    nexts = np.array([[2.0], [4.0], [0.0]])
    done = np.array([[False], [False], [True]])
    got = gae(np.array([[1.0], [2.0], [3.0]]), values, nexts, done, 0.5, 0.5)
    # A_2 = -1, A_1 = 2 - 1/4, A_0 = 1 + 1.75/4
    np.testing.assert_array_equal(got[:, 0], [1.4375, 1.75, -1.0])


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (0.8, 1.0), (1.0, 1.0), (0.0, 0.5)])
def test_gae_equals_the_double_loop(gamma: float, lam: float) -> None:
    """Terminations, time-outs and the rollout's end; each stretch by its own sums."""
    rng = np.random.default_rng(0)
    steps, envs = 23, 5
    rewards, values = rng.standard_normal((steps, envs)), rng.standard_normal((steps + 1, envs))
    done = rng.random((steps, envs)) < 0.15
    done[4, 0] = done[5, 0] = True  # an episode of one step
    done[-1, 1] = True  # an end on the last step
    done[:, 2] = False  # one stretch from end to end
    terminated = done & (rng.random((steps, envs)) < 0.5)
    last_state = rng.standard_normal((steps, envs))  # value of an ended episode's own last state
    nexts = np.where(terminated, 0.0, np.where(done, last_state, values[1:]))
    assert (done & ~terminated).any()
    assert terminated.any()
    got = gae(rewards, values[:-1], nexts, done, gamma, lam)
    for e in range(envs):
        start = 0
        while start < steps:
            ends = [t for t in range(start, steps) if done[t, e]]
            end = ends[0] if ends else steps - 1
            if not done[end, e]:
                after = values[steps, e]  # the rollout is cut: the next state's own value
            else:
                after = 0.0 if terminated[end, e] else last_state[end, e]
            stretch = [*values[start : end + 1, e], after]
            expected = gae_of_episode(rewards[start : end + 1, e], stretch, gamma, lam)
            np.testing.assert_allclose(got[start : end + 1, e], expected, rtol=0, atol=1e-12)
            start = end + 1


def test_the_learner_bootstraps_from_the_episode_s_own_last_state() -> None:
    """The learner's composition of critic values: 0 after a termination, final_obs after a time-out."""
    from trainers.control_learner import ControlLearner

    rng = np.random.default_rng(1)
    obs = rng.standard_normal((7, 2, 1)).astype(np.float32)
    final = np.array([[10.0], [20.0], [30.0]], np.float32)
    terminated, truncated = np.zeros((6, 2), bool), np.zeros((6, 2), bool)
    truncated[1, 0] = terminated[3, 0] = truncated[5, 1] = True
    rollout: Any = SimpleNamespace(
        terminated=terminated,
        done=terminated | truncated,
        final_index=np.array([[1, 0], [3, 0], [5, 1]]),
    )
    critic = torch.nn.Linear(1, 1)
    with torch.no_grad():
        critic.weight.fill_(2.0)
        critic.bias.fill_(1.0)
    rewards = rng.standard_normal((6, 2)).astype(np.float32)
    advantages, targets = ControlLearner._advantage(
        rollout, rewards, critic, torch.from_numpy(obs), final, 0.9, 0.8
    )
    value = 2 * obs[..., 0].astype(np.float64) + 1
    stretches = [(0, 0, 2, 21.0), (0, 2, 4, 0.0), (0, 4, 6, value[6, 0]), (1, 0, 6, 61.0)]
    for env, start, end, after in stretches:
        v = [*value[start:end, env], after]
        expected = gae_of_episode(rewards[start:end, env], v, 0.9, 0.8)
        np.testing.assert_allclose(advantages[start:end, env], expected, rtol=0, atol=2e-5)
        np.testing.assert_allclose(
            targets[start:end, env], np.add(expected, value[start:end, env]), rtol=0, atol=2e-5
        )


def test_mixed_advantage_by_hand() -> None:
    a_r = np.array([[1.0, 3.0], [5.0, 7.0]])  # mean 4, deviation sqrt 5
    a_c = np.array([[0.0, 0.0], [0.0, 8.0]])  # mean 2, deviation sqrt 12
    standard = np.array([[-3.0, -1.0], [1.0, 3.0]]) / math.sqrt(5)
    centred = np.array([[-2.0, -2.0], [-2.0, 6.0]])

    def mixed(*args):
        return mixed_advantage(a_r, *args)

    exact = {"rtol": 0, "atol": 1e-7}  # the release's 1e-8 beside the deviation
    np.testing.assert_allclose(mixed(None, 0.0, True), standard, **exact)
    np.testing.assert_allclose(mixed(a_c, 0.0, False), standard, **exact)
    np.testing.assert_allclose(mixed(a_c, 3.0, False), (standard - 3 * centred) / 4, **exact)
    np.testing.assert_allclose(mixed(a_c, 3.0, True), (standard - 3 * centred / math.sqrt(12)) / 4, **exact)
    # A deviation below 0.1 is taken as 0.1: here 0.01 sqrt 12 = 0.035.
    np.testing.assert_allclose(mixed(a_c / 100, 1.0, True), (standard - centred / 10) / 2, **exact)
    np.testing.assert_allclose(mixed(np.zeros((2, 2)), 1.0, True), standard / 2, **exact)
    np.testing.assert_array_equal(a_c, [[0, 0], [0, 8]])  # the inputs are left as they were


def test_a_large_multiplier_leaves_the_cost_alone() -> None:
    a_r, a_c = np.array([[1.0, 3.0]]), np.array([[2.0, -2.0]])
    np.testing.assert_allclose(mixed_advantage(a_r, a_c, 1e9, False), -a_c, atol=1e-8)


# -- the networks


def config(**settings: Any) -> LearnerConfig:
    given: dict[str, Any] = {
        "hidden_sizes": [4],
        "target_kl": None,
        "epochs": 1,
        "minibatch_steps": ROWS,
        "max_grad_norm": 1e9,
        "log_std_min": -9.0,
        "log_std_max": 9.0,
        **settings,
    }
    return LearnerConfig(**given)


def networks(c: LearnerConfig, memory: int = MEMORY, cost: bool = True, seed: int = 0) -> ActorCritics:
    """In float64, with weights everywhere: also where training starts from zero."""
    torch.manual_seed(seed)
    nets = ActorCritics(OBS, memory, ACTIONS, c, cost).double()
    with torch.no_grad():
        for p in nets.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return nets


def data(nets: ActorCritics, *, ratio_spread: float, seed: int = 1, rows: int = ROWS) -> Columns:
    """Rows whose importance ratios are exp(U(-spread, spread))."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape))

    inputs = draw(rows, nets.actor[0].in_features)
    with torch.no_grad():
        actions = nets.mean(inputs) + 0.6 * draw(rows, ACTIONS)
        log_prob = nets.log_prob(inputs, actions)
    log_prob = log_prob - ratio_spread * torch.from_numpy(rng.uniform(-1, 1, rows))
    cost_target = draw(rows) if nets.cost_critic is not None else None
    return Columns(inputs, actions, log_prob, draw(rows), draw(rows), cost_target)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Recorder(torch.optim.SGD):
    """Notes every gradient and moves nothing."""

    def __init__(self, nets: ActorCritics):
        self.names = [name for name, _ in nets.named_parameters()]
        super().__init__(nets.parameters(), lr=0.0)
        self.gradients: list[dict[str, np.ndarray]] = []

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        self.gradients.append({n: g.numpy().copy() for n, g in zip(self.names, grads, strict=True)})


def as_reference(nets: ActorCritics) -> dict[str, list[np.ndarray]]:
    """The parameters as the oracle takes them; the arrays share the tensors' memory."""
    parts = {"actor": nets.actor, "reward_critic": nets.reward_critic, "cost_critic": nets.cost_critic}
    arrays = {k: [p.detach().numpy() for p in net.parameters()] for k, net in parts.items() if net}
    return {**arrays, "log_std": [nets.log_std.detach().numpy()]}


def test_entropy_and_density_by_hand() -> None:
    nets = networks(config(), memory=0)
    with torch.no_grad():
        nets.log_std.copy_(torch.tensor([0.0, math.log(2.0)]))
    # 1/2 log(2 pi e) + 1/2 log(2 pi e 4) = 1.4189385 + 2.1120857
    assert nets.entropy().item() == pytest.approx(3.5310242, abs=1e-6)
    x = torch.randn(1, OBS, dtype=torch.float64, generator=generator())
    mean = nets.mean(x)
    at = mean.detach() + torch.tensor([[1.0, 2.0]])  # one deviation away in each
    # 2 x (-1/2) - log(2 pi) - log 2
    assert nets.log_prob(x, at).item() == pytest.approx(-1.0 - 1.8378771 - 0.6931472, abs=1e-6)
    assert (mean.abs() < 1).all()


def test_the_new_actor_s_mean_is_near_zero_and_memory_does_not_count() -> None:
    torch.manual_seed(0)
    nets = ActorCritics(OBS, MEMORY, ACTIONS, LearnerConfig(log_std_init=-0.7), cost_critic=True)
    x = torch.randn(50, OBS + MEMORY)
    other = torch.cat([x[:, :OBS], torch.randn(50, MEMORY)], 1)
    assert nets.mean(x).abs().max() < 0.1
    torch.testing.assert_close(nets.mean(x), nets.mean(other), rtol=0, atol=0)
    torch.testing.assert_close(nets.cost_critic(x), nets.cost_critic(other), rtol=0, atol=0)
    np.testing.assert_array_equal(nets.log_std.detach(), np.float32([-0.7, -0.7]))


def test_without_memory_and_cost_the_networks_are_drawn_alike() -> None:
    """PPO and its constrained variants start from the same actor and reward critic."""

    def drawn(memory: int, cost: bool) -> ActorCritics:
        torch.manual_seed(5)
        return ActorCritics(OBS, memory, ACTIONS, LearnerConfig(), cost)

    plain, rich = drawn(0, False), drawn(MEMORY, True)
    assert plain.cost_critic is None
    torch.testing.assert_close(rich.actor[0].weight[:, :OBS], plain.actor[0].weight, rtol=0, atol=0)
    for name in ("actor.2.weight", "actor.4.weight", "reward_critic.0.weight", "reward_critic.4.bias"):
        torch.testing.assert_close(rich.get_parameter(name), plain.get_parameter(name), rtol=0, atol=0)


def test_a_memory_of_zeros_leaves_the_update_as_it_is_to_the_last_bit() -> None:
    c = LearnerConfig(minibatch_steps=100, epochs=3, cost_critic_l2=0.01, entropy_coef=0.01)
    rng = np.random.default_rng(0)
    obs, memory = rng.standard_normal((400, 17)), np.zeros((400, 8))
    others = [rng.standard_normal(shape) for shape in [(400, 6), 400, 400, 400, 400]]
    results = []
    for inputs, width in ((obs, 0), (np.concatenate([obs, memory], 1), 8)):
        torch.manual_seed(2)
        nets = ActorCritics(17, width, 6, c, cost_critic=True)
        columns = Columns(*(torch.from_numpy(x.astype(np.float32)) for x in [inputs, *others]))
        columns.log_prob = nets.log_prob(columns.inputs, columns.actions).detach()
        ppo_update(nets, torch.optim.Adam(nets.parameters(), 1e-3), columns, c, generator())
        results.append({name: p.detach().numpy() for name, p in nets.named_parameters()})
    plain, wide = results
    for name, array in plain.items():
        first = name in ("actor.0.weight", "cost_critic.0.weight")
        np.testing.assert_array_equal(wide[name][:, :17] if first else wide[name], array, err_msg=name)
    assert not wide["actor.0.weight"][:, 17:].any()


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("squash", [True, False])
def test_the_runners_copy_plays_the_learner_s_mean(activation: str, squash: bool) -> None:
    c = LearnerConfig(hidden_sizes=[6, 5], activation=activation, squash_mean=squash)
    nets = networks(c).float()
    norm = RunningMeanStd(OBS)
    norm.update(np.random.default_rng(0).normal(2.0, 3.0, (40, OBS)))
    spec = SimpleNamespace(obs_dim=OBS, action_low=-np.ones(ACTIONS), action_high=np.ones(ACTIONS))
    policy = GaussianPolicy(**policy_arrays(nets, norm, spec, c))
    x = np.random.default_rng(1).standard_normal((20, OBS + MEMORY)).astype(np.float32)
    with torch.no_grad():
        np.testing.assert_allclose(policy.mean(x), nets.mean(torch.from_numpy(x)).numpy(), rtol=0, atol=2e-6)
    np.testing.assert_allclose(policy.obs_mean, norm.mean, rtol=1e-6)
    np.testing.assert_allclose(policy.obs_std, norm.std, rtol=1e-6)
    with torch.no_grad():  # the copy does not follow the learner
        before = policy.mean(x)
        for p in nets.parameters():
            p.zero_()
    np.testing.assert_array_equal(policy.mean(x), before)
    c.normalize_obs = False
    plain = GaussianPolicy(**policy_arrays(nets, norm, spec, c))
    np.testing.assert_array_equal(plain.normalize(x[:, :OBS]), x[:, :OBS])


# -- one update


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"entropy_coef": 0.0},
    "everything": {"entropy_coef": 0.03, "critic_l2": 0.002, "cost_critic_l2": 0.05, "value_coef": 0.7},
    "linear mean": {"squash_mean": False, "clip": 0.1},
    "two hidden layers": {"hidden_sizes": [3, 4]},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("cost", [True, False], ids=["cost critic", "no cost critic"])
def test_the_gradient_is_the_loss_s(name: str, cost: bool) -> None:
    """Every entry of the gradient against central differences of a loss written row by row."""
    c = config(**SETTINGS[name])
    nets = networks(c, cost=cost)
    columns = data(nets, ratio_spread=0.5)
    optimizer = Recorder(nets)
    stats = ppo_update(nets, optimizer, columns, c, generator())
    arrays = as_reference(nets)
    rows = {k: v.numpy() for k, v in vars(columns).items() if v is not None}

    def loss() -> float:
        return reference.loss(arrays, rows, c, OBS)

    assert 0.2 < stats["clip_fraction"] < 0.9  # both branches of the clip are at work
    assert stats["loss"] == pytest.approx(loss(), abs=1e-12)
    (got,) = optimizer.gradients
    expected = {n: reference.numerical_gradient(loss, p.detach().numpy()) for n, p in nets.named_parameters()}
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert np.abs(value).max() > 1e-5, key
        np.testing.assert_allclose(got[key], value, rtol=1e-6, atol=1e-8, err_msg=key)


def test_at_the_first_step_the_ratio_is_one() -> None:
    """On fresh data the loss is minus the mean advantage, its gradient that of A log pi, nothing clipped."""
    c = config(value_coef=0.0)
    nets = networks(c)
    columns = data(nets, ratio_spread=0.0)
    optimizer = Recorder(nets)
    stats = ppo_update(nets, optimizer, columns, c, generator())
    assert stats["loss"] == pytest.approx(-float(columns.advantage.mean()), abs=1e-12)
    assert stats["kl"] == pytest.approx(0.0, abs=1e-12)
    assert stats["clip_fraction"] == 0.0
    nets.zero_grad()
    (-(columns.advantage * nets.log_prob(columns.inputs, columns.actions)).mean()).backward()
    for name, p in nets.named_parameters():
        if p.grad is not None:
            np.testing.assert_allclose(optimizer.gradients[0][name], p.grad.numpy(), rtol=0, atol=1e-12)


def test_rows_the_clip_has_cut_off_push_no_further() -> None:
    c = config(value_coef=0.0)
    nets = networks(c)
    columns = data(nets, ratio_spread=0.0)
    columns.log_prob = columns.log_prob - math.log(1.5)  # every ratio is 1.5
    columns.advantage = columns.advantage.abs()
    stats = ppo_update(nets, optimizer := Recorder(nets), columns, c, generator())
    assert stats["clip_fraction"] == 1.0
    assert stats["loss"] == pytest.approx(-1.2 * float(columns.advantage.mean()), abs=1e-12)
    # 1.5 - 1 - log 1.5
    assert stats["kl"] == pytest.approx(0.0945349, abs=1e-7)
    assert all(not g.any() for g in optimizer.gradients[0].values())
    columns.advantage = -columns.advantage  # bad actions grown likelier are still pushed down
    ppo_update(nets, optimizer := Recorder(nets), columns, c, generator())
    assert np.abs(optimizer.gradients[0]["actor.0.weight"]).max() > 1e-3


def test_only_the_actor_s_gradient_is_clipped() -> None:
    c = config()
    nets = networks(c)
    columns = data(nets, ratio_spread=0.1)
    free, bound = Recorder(nets), Recorder(nets)
    stats = ppo_update(nets, free, columns, c, generator())
    ppo_update(nets, bound, columns, config(max_grad_norm=0.05), generator())
    actor = [n for n in free.names if n.startswith("actor") or n == "log_std"]
    norm = math.sqrt(sum((free.gradients[0][n] ** 2).sum() for n in actor))
    assert norm > 0.1
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-9)
    for name in free.names:
        # torch divides by norm + 1e-6
        scale = 0.05 / (norm + 1e-6) if name in actor else 1.0
        np.testing.assert_allclose(
            bound.gradients[0][name], scale * free.gradients[0][name], rtol=1e-9, atol=1e-15, err_msg=name
        )


@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_minibatches_of_a_pass_have_the_whole_batch_s_gradient_as_their_mean(size: int) -> None:
    """Any split into equal minibatches weighs every row alike; L2 and entropy included."""
    settings: dict[str, Any] = {"entropy_coef": 0.03, "critic_l2": 0.002, "cost_critic_l2": 0.05}
    nets = networks(config())
    columns = data(nets, ratio_spread=0.3)
    whole, parts = Recorder(nets), Recorder(nets)
    ppo_update(nets, whole, columns, config(**settings), generator())
    stats = ppo_update(nets, parts, columns, config(minibatch_steps=size, **settings), generator())
    assert stats["gradient_steps"] == len(parts.gradients) == ROWS // size
    for name in whole.names:
        mean = np.mean([g[name] for g in parts.gradients], 0)
        np.testing.assert_allclose(mean, whole.gradients[0][name], rtol=0, atol=1e-12, err_msg=name)


def test_leftover_rows_wait_for_the_next_pass() -> None:
    """12 rows in minibatches of 5: two steps a pass, never a minibatch of 2, other rows each time."""
    c = config(minibatch_steps=5, epochs=40, value_coef=0.5)
    nets = networks(c)
    columns = data(nets, ratio_spread=0.0)
    columns.reward_target = nets.reward_critic(columns.inputs[:, :OBS])[:, 0].detach() - torch.arange(12.0)
    optimizer = Recorder(nets)
    stats = ppo_update(nets, optimizer, columns, c, generator())
    assert (stats["gradient_steps"], stats["epochs"]) == (80, 40)
    # The gradient of the critic's last bias is the mean error of the minibatch's rows: the row's number.
    sums = [5 * float(g["reward_critic.2.bias"][0]) for g in optimizer.gradients]
    np.testing.assert_allclose(sums, np.round(sums), rtol=0, atol=1e-6)
    left_out = [66 - sums[i] - sums[i + 1] for i in range(0, 80, 2)]  # 0 + ... + 11 = 66
    assert all(1 - 1e-6 <= x <= 21 + 1e-6 for x in left_out)  # two different rows
    assert len({round(x) for x in left_out}) > 8


def test_a_minibatch_larger_than_the_batch_is_the_batch() -> None:
    nets = networks(config())
    columns = data(nets, ratio_spread=0.3)
    one, other = Recorder(nets), Recorder(nets)
    ppo_update(nets, one, columns, config(), generator())
    stats = ppo_update(nets, other, columns, config(minibatch_steps=1000), generator())
    assert stats["gradient_steps"] == 1
    for name in one.names:
        np.testing.assert_allclose(other.gradients[0][name], one.gradients[0][name], rtol=0, atol=1e-15)


def adam(nets: ActorCritics, lr: float) -> torch.optim.Adam:
    """As the learner builds it."""
    return torch.optim.Adam(nets.parameters(), lr=lr, eps=1e-5, fused=True)


def test_a_learning_rate_of_zero_leaves_every_byte() -> None:
    c = config(epochs=3, minibatch_steps=4, entropy_coef=0.01, critic_l2=0.01)
    nets = networks(c).float()
    columns = data(networks(c), ratio_spread=0.3)
    columns = Columns(*(v.float() for v in vars(columns).values()))
    before = [p.detach().numpy().tobytes() for p in nets.parameters()]
    ppo_update(nets, adam(nets, 0.0), columns, c, generator())
    assert [p.detach().numpy().tobytes() for p in nets.parameters()] == before
    ppo_update(nets, adam(nets, 1e-3), columns, c, generator())
    assert all(p.detach().numpy().tobytes() != b for p, b in zip(nets.parameters(), before, strict=True))


def test_it_stops_once_the_divergence_passes_the_target() -> None:
    start = networks(config())
    columns = data(start, ratio_spread=0.0)

    def update(target: float | None, epochs: int = 8):
        nets = copy.deepcopy(start)
        c = config(epochs=epochs, target_kl=target, minibatch_steps=6, value_coef=0.0)
        stats = ppo_update(nets, adam(nets, 0.004), columns, c, generator())
        with torch.no_grad():
            log_ratio = nets.log_prob(columns.inputs, columns.actions) - columns.log_prob
        kl = float(np.mean([math.exp(x) - 1 - x for x in log_ratio.tolist()]))
        assert stats["kl"] == pytest.approx(kl, abs=1e-12)
        return nets, stats

    by_epoch = [update(None, epochs)[1]["kl"] for epochs in range(1, 9)]
    assert np.all(np.diff(by_epoch) > 0)
    for stop in (1, 3, 5):
        target = 0.5 * (by_epoch[stop - 2] if stop > 1 else 0.0) + 0.5 * by_epoch[stop - 1]
        nets, stats = update(target)
        assert (stats["epochs"], stats["gradient_steps"]) == (stop, 2 * stop)
        unbound, _ = update(None, stop)
        for p, q in zip(nets.parameters(), unbound.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)
    assert update(None)[1]["epochs"] == 8
    assert update(100.0)[1]["epochs"] == 8


def test_log_std_stays_inside_its_limits() -> None:
    for sign, limit in ((1.0, -0.3), (-1.0, -1.2)):
        c = config(epochs=30, entropy_coef=sign * 10.0, log_std_min=-1.2, log_std_max=-0.3, value_coef=0.0)
        nets = networks(c)
        stats = ppo_update(nets, adam(nets, 0.1), data(nets, ratio_spread=0.0), c, generator())
        np.testing.assert_array_equal(nets.log_std.detach().numpy(), limit)
        assert stats["policy_std"] == pytest.approx(math.exp(limit), rel=1e-9)


def test_the_same_generator_gives_the_same_weights() -> None:
    c = config(epochs=3, minibatch_steps=5)
    start = networks(c)
    columns = data(start, ratio_spread=0.1)

    def after(seed: int) -> bytes:
        nets = copy.deepcopy(start)
        ppo_update(nets, adam(nets, 1e-2), columns, c, generator(seed))
        return b"".join(p.detach().numpy().tobytes() for p in nets.parameters())

    assert after(0) == after(0) != after(1)


def test_the_update_raises_the_likelihood_of_good_actions_and_fits_the_critics() -> None:
    c = config(epochs=200, minibatch_steps=4, clip=0.2)
    nets = networks(c)
    columns = data(nets, ratio_spread=0.0)
    ppo_update(nets, adam(nets, 0.01), columns, c, generator())
    with torch.no_grad():
        moved = nets.log_prob(columns.inputs, columns.actions) - columns.log_prob
        error = nets.cost_critic(columns.inputs)[:, 0] - columns.cost_target
    assert float((moved * columns.advantage).mean()) > 0.05
    assert float(error.pow(2).mean()) < 0.1 * float(columns.cost_target.var())
