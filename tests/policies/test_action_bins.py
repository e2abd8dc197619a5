"""Bins of actions, against a table and over all tokens."""

import pytest
import torch
from support.checks import close

from ecrl.policies.action_bins import ActionBins
from ecrl.spaces import Box, box

SPACE = Box((-1.0, 0.0, -2.0, 0.0), (1.0, 4.0, 2.0, 4.0), (2, 2))


def test_centres_and_bins_by_hand():
    bins = ActionBins(SPACE, (4, 2))
    assert bins.shape == (2, 2) and bins.width == 4
    tokens = torch.tensor([[[0, 1], [3, 0]]])
    action = torch.tensor([[[-0.75, 3.0], [1.5, 1.0]]])
    close(bins.centres(tokens, torch.zeros(())), action)
    assert torch.equal(bins.tokens(action), tokens)
    assert bins.legal(torch.device("cpu")).tolist() == [[True] * 4, [True, True, False, False]] * 2


def test_actions_outside_of_the_space_are_in_the_outer_bins():
    bins = ActionBins(box(-1.0, 1.0, 1), (4,))
    assert bins.tokens(torch.tensor([[-9.0], [-1.0], [1.0], [9.0]])).flatten().tolist() == [0, 0, 3, 3]


@pytest.mark.parametrize("count", [2, 3, 32, 255, 4096])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.1, 0.3), (-1e38, 1e38), (1000.0, 1001.0)])
def test_the_bin_of_a_centre_is_its_token(count, low, high):
    bins, tokens = ActionBins(box(low, high, 1), (count,)), torch.arange(count).reshape(-1, 1, 1)
    action = bins.centres(tokens, torch.zeros(()))
    assert action.shape == (count, 1) and action.isfinite().all()
    assert torch.equal(bins.tokens(action), tokens)


def test_a_number_whose_bounds_are_equal_has_one_bin():
    bins = ActionBins(Box((0.5, -1.0), (0.5, 1.0), (2,)), (3, 3))
    assert bins.fixed() == (True, False)
    assert bins.legal(torch.device("cpu")).tolist() == [[True, False, False], [True] * 3]
    tokens = bins.tokens(torch.tensor([[0.5, 0.9]]))
    assert tokens.tolist() == [[[0, 2]]]
    close(bins.centres(tokens, torch.zeros(())), [[0.5, 2 / 3]])
