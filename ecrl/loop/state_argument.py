"""Check that the argument `state` of a public function is the state of a run."""

from tensordict import TensorDictBase

from ecrl.errors import UserError


def check_state_argument(state: object, *fields: str) -> None:
    """Raise UserError if `state` is not a TensorDict, or if it lacks one of the fields that the caller reads.

    >>> check_state_argument(None, "key")
    Traceback (most recent call last):
    ecrl.errors.UserError: state: got None, expected the state of a run; pass the result of init_state, the "state" of a
        record, or the first result of train or load
    """
    problem = f"got {'None' if state is None else type(state).__name__}"
    if isinstance(state, TensorDictBase):
        missing = [name for name in fields if name not in state]
        if not missing:
            return
        problem = f"got a TensorDict without {', '.join(missing)}"
    sources = 'the result of init_state, the "state" of a record, or the first result of train or load'
    raise UserError(f"state: {problem}, expected the state of a run; pass {sources}")
