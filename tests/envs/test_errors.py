import pickle

from envs.errors import UserError, nearest


def test_message_names_what_given_allowed_and_fix():
    error = UserError("unknown thing", given="foo", allowed=["bar", "baz"], fix="write bar")
    assert str(error).splitlines() == [
        "unknown thing",
        "  given:   'foo'",
        "  allowed: bar, baz",
        "  fix:     write bar",
    ]
    assert str(UserError("only this")) == "only this"
    assert isinstance(error, ValueError)


def test_message_survives_a_process_border():
    class_error = pickle.loads(pickle.dumps(UserError("what", given=3, allowed="1 or 2", fix="say 1")))
    assert isinstance(class_error, UserError)
    assert str(class_error) == "what\n  given:   3\n  allowed: 1 or 2\n  fix:     say 1"


def test_nearest_prefers_contained_then_similar_names():
    names = ["SafetyHopperVelocity-v1", "SafetyAntVelocity-v1", "SafetyHalfCheetahVelocity-v1"]
    assert nearest("SafetyHoperVelocity-v1", names)[0] == "SafetyHopperVelocity-v1"
    assert nearest("ant", names, n=1) == ["SafetyAntVelocity-v1"]
    assert nearest("learning", ["learner", "run", "env"], n=1) == ["learner"]
    assert nearest("x", []) == []
