"""The README's Python runs as printed, on a copy of its config with a smaller budget."""

import json
import re

import pytest
import torch
from test_public import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture
def small_configs(tmp_path, monkeypatch):
    data = json.loads((ROOT / "configs" / "cartpole_ppo.json").read_text())
    data["trainer"] |= {"iterations": 2, "compile": "off"}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "cartpole_ppo.json").write_text(json.dumps(data))
    monkeypatch.chdir(tmp_path)


def test_from_python(small_configs, capsys):
    names: dict = {}
    exec(BLOCKS[0], names)  # text of this repository's own README
    assert len(names["history"]) == 2
    assert names["cfg"].trainer.seed == 3
    assert int(names["state"]["sample_step"]) == 2 * 32 * 128
    after, logs = names["iteration"](names["state"])
    assert int(after["update_step"]) == 3
    assert set(logs) == {"collect", "train"}
    assert names["states"].batch_size == (8,) == names["logs"]["train"]["policy_loss"].shape


def test_one_kernel_in_your_own_trainer():
    from tensordict import TensorDict

    no = torch.zeros(2, 4, dtype=torch.bool)
    fields = {key: torch.randn(2, 4, generator=torch.Generator().manual_seed(1)) for key in ("reward", "value")}
    flags = {"terminated": no, "truncated": no, "done": no}
    names: dict = {"rollout": TensorDict(fields | flags, [2, 4]), "next_value": fields["value"][:, 1:]}
    names |= {key: tensor[:, :-1] for key, tensor in (fields | flags).items()}
    exec(BLOCKS[1], names)
    torch.testing.assert_close(names["out"].advantage, names["advantages"])
    torch.testing.assert_close(names["out"].value_target, names["returns"])


def test_nothing_else_is_promised_in_python():
    assert len(BLOCKS) == 2
