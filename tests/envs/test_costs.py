import math

import numpy as np
import pytest

from envs.costs import make_cost
from envs.errors import UserError

OBS, ACTION, INFO = np.array([0.5, -2.0]), np.array([3.0, 4.0]), {"x_velocity": 1.2, "hurt": 7}


@pytest.mark.parametrize(
    ("spec", "cost"),
    [
        ("x_velocity_above:1.1", 1.0),
        ("x_velocity_above:1.2", 0.0),
        ("obs_above:0:0.4", 1.0),
        ("obs_above:1:0.4", 0.0),
        ("obs_below:1:-1.5", 1.0),
        ("obs_below:0:-1.5", 0.0),
        ("abs_obs_above:1:1.9", 1.0),
        ("abs_obs_above:1:2", 0.0),
        ("action_norm_above:4.9", 1.0),
        ("action_norm_above:5", 0.0),
        ("info_above:hurt:6", 1.0),
        ("info_above:hurt:7", 0.0),
        ("info:hurt", 7.0),
    ],
)
def test_named_costs(spec, cost):
    value = make_cost(spec)(OBS, ACTION, INFO)
    assert value == cost
    assert isinstance(value, float)


def test_a_function_of_ones_own_by_import_path():
    assert make_cost("math:hypot") is math.hypot


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("x_velocity:1", r"unknown cost function 'x_velocity'; nearest: x_velocity_above"),
        ("speed", r"unknown cost function 'speed'"),
        ("obs_above:0", r"wrong arguments\n.*'obs_above:0'\n.*obs_above:INDEX\(int\):LIMIT\(float\)"),
        ("obs_above:zero:1", r"wrong arguments"),
        ("no_such_module:tilt", r"cannot be imported: No module named 'no_such_module'"),
        ("math:tilt", r"cannot be imported: module 'math' has no attribute 'tilt'"),
        ("math:pi", r"cannot be called"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(UserError, match=message):
        make_cost(spec)
