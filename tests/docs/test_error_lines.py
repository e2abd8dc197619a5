"""Every error line that the FAQ and the page on Gymnasium quote is the line that ecrl prints."""

import json
import re
import warnings

import pytest
import torch
from support import fake_gymnasium_envs  # noqa: F401  (registers Text-v0 and DictAction-v0)
from support.doc_pages import blocks
from support.off_policy_agents import agent
from support.small_runs import NET, last_state, small

import ecrl
from ecrl.envs import Env, state_of
from ecrl.errors import UserError
from ecrl.run.train import train_from_config
from ecrl.spaces import Discrete, box

pytestmark = pytest.mark.usefixtures("restored_registry")
PAGES = ("docs/faq.md", "docs/gymnasium.md")
LINES = [(page, block.text.strip()) for page in PAGES for block in blocks(page) if not block.language]


def config(**changes):
    base = {
        "trainer": {"compile": "off", "num_envs": 4, "buffer_size": 8, "iterations": 1},
        "env": {"name": "cartpole"},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 16}},
    }
    return ecrl.load_config(base | changes)


def start(**changes):
    return ecrl.init_state(config(**changes))


def run(cfg, *args):
    return ecrl.train(ecrl.init_state(cfg), cfg, *args, progress=False)


class NoSettings(ecrl.ConfigModel):
    """No settings."""


def environment(name, reward=0.0, dtype=torch.float32, space=None, actions=None):
    """Register an environment with this reward, observation space and action space."""

    @ecrl.register_env(name, override=True)
    def make(cfg: NoSettings) -> Env:
        def reset(keys):
            return state_of(torch.zeros(*keys.shape, 2), keys.shape)

        def step(state, action, noise):
            return state.copy().update({"reward": torch.full(state.shape, reward, dtype=dtype)})

        return Env(reset, step, space or box(-1.0, 1.0, 2), actions or Discrete(2))

    return {"name": name}


def misspelt_key(tmp_path):
    data = {"trainer": {"sede": 1}, "env": {"name": "cartpole"}, "algorithm": {"name": "ppo"}}
    (tmp_path / "my.json").write_text(json.dumps(data))
    ecrl.load_config("my.json")


def same_folder():
    for _ in range(2):
        run(small(), "outputs/first")


def changed_config():
    run(small(), "outputs/second")
    train_from_config(resume_from="outputs/second", overrides={"algorithm.cfg.gamma": 0.9})


def finished():
    cfg = small()
    ecrl.train(last_state(cfg), cfg, progress=False)


def overwritten():
    cfg = agent("dqn")
    states = [record["state"] for record in ecrl.train_iter(ecrl.init_state(cfg), cfg)]
    ecrl.train_iter(states[0], cfg)


def memory_with_small_minibatch():
    return start(
        policy={"name": "recurrent", "actor": NET, "critic": NET},
        algorithm={"name": "ppo", "cfg": {"batch_size": 4}},
    )


UNBOUNDED = box(-float("inf"), float("inf"), 1)
CASES = {
    "docs/faq.md": [
        misspelt_key,
        lambda: config(algorithm={"name": "ppo", "cfg": {"lr": 1e-3}}),
        lambda: config(algorithm={"name": "ppo", "cfg": {"capacity": 10}}),
        lambda: config(env={"name": "grid_world"}),
        lambda: run(small(**{"trainer.device": "cuda:7"})),
        lambda: start(policy={"name": "actor_only"}),
        lambda: start(algorithm={"name": "sac"}),
        lambda: ecrl.init_state(agent("sac", **{"algorithm.cfg.learning_starts": 1000})),
        memory_with_small_minibatch,
        lambda: start(algorithm={"name": "grpo", "cfg": {"group_size": 3}}),
        lambda: start(env=environment("f64", dtype=torch.float64)),
        lambda: start(env=environment("shape", space=box(-1.0, 1.0, 3))),
        lambda: run(config(env=environment("nan", reward=torch.nan))),
        same_folder,
        changed_config,
        finished,
        lambda: ecrl.train(ecrl.init_state(small()), small(**{"trainer.num_envs": 8}), progress=False),
        overwritten,
        lambda: run(small())[1].plot("reward"),
    ],
    "docs/gymnasium.md": [
        lambda: start(env={"name": "gymnasium:Text-v0"}),
        lambda: start(env={"name": "gymnasium:DictAction-v0"}),
        lambda: start(env={"name": "gymnasium:Warehouse-v0"}),
        lambda: start(env={"name": "gymnasium:my_halls:Hall-v0"}),
        lambda: start(env=environment("unbounded", actions=UNBOUNDED), algorithm={"name": "sac"}),
        lambda: start(env={"name": "gymnasium:Pendulum-v1"}, algorithm={"name": "apg"}),
        lambda: start(env={"name": "gymnasium:Pendulum-v1", "action_chunk": 4}),
    ],
}
"""Calls that print the lines of a page, in order."""


def printed(call, tmp_path):
    """Return the message of the error that a call raises, or of its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            call(tmp_path) if call is misspelt_key else call()
        except (UserError, UserWarning) as error:
            return str(error)
    raise AssertionError("the call has printed no line")


@pytest.mark.parametrize(
    ("quoted", "call"),
    [
        pytest.param(text, call, id=text[:50])
        for page in PAGES
        for text, call in zip([text for on, text in LINES if on == page], CASES[page], strict=True)
    ],
)
def test_the_line_is_printed(quoted, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pattern = ".*".join(map(re.escape, quoted.split("...")))
    message = printed(call, tmp_path)
    assert re.fullmatch(pattern, message, re.DOTALL), message


@pytest.mark.parametrize("page", PAGES)
def test_every_quoted_line_has_a_call(page):
    assert len(CASES[page]) == len([text for on, text in LINES if on == page]) > 5
