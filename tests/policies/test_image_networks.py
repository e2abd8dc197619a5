"""Networks that read images: their values, layouts, encoders and errors."""

import pytest
import torch
import torch.nn.functional as F
from support.checks import close
from support.graphs import graph_of
from support.small_runs import NET
from tensordict import TensorDict

from ecrl import rng
from ecrl.config.model import validate_section
from ecrl.errors import ConfigError
from ecrl.loop.policy_check import check_policy
from ecrl.policies import NetworkConfig, flatten, make_network, make_policy, stacked_space
from ecrl.policies.convolutions import CNNConfig
from ecrl.policies.images import channel_shape
from ecrl.spaces import Discrete, box, dict_space

UINT8 = {"dtype": torch.uint8}
IMAGE, VECTOR = box(0, 255, 12, 10, 3, **UINT8), box(-1.0, 1.0, 4)
BOTH = dict_space({"camera": IMAGE, "joints": VECTOR})
CNN = {"channels": [4, 5], "kernel_sizes": [4, 3], "strides": [2, 1], "hidden_sizes": [7]}
KEYPOINTS = {"channels": [6, 4], "kernel_sizes": [3, 3], "strides": [2, 1], "hidden_sizes": [8]}
SMALL = {"cnn": CNN, "impala": {"channels": [4, 4], "hidden_sizes": [8]}, "keypoints": KEYPOINTS}


def block(name, **settings):
    return {"type": name, "network_cfg": {**SMALL.get(name, {}), **settings}}


def network(cfg, space, outputs=2):
    return make_network(NetworkConfig.model_validate(cfg), space, outputs, False, "policy.actor")


def images(*batch, space=IMAGE, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*batch, *space.shape), generator=g, dtype=torch.uint8)


def observations(*batch):
    joints = torch.randn(*batch, 4, generator=torch.Generator().manual_seed(1))
    return TensorDict({"camera": images(*batch), "joints": joints}, batch)


def test_a_cnn_by_hand():
    net = network(block("cnn"), IMAGE)
    weights, image = net.init(), images(3)
    w = {name.removeprefix("convolutions."): x for name, x in weights.items()}
    x = image.permute(0, 3, 1, 2).float() / 255.0
    for i, stride in ((0, 2), (2, 1)):
        x = F.conv2d(x, w[f"{i}.weight"], w[f"{i}.bias"], stride).relu()
    x = F.linear(x.flatten(1), w["head.0.weight"], w["head.0.bias"]).relu()
    close(net.forward(weights, image), F.linear(x, w["head.2.weight"], w["head.2.bias"]))


def test_plain_names_have_the_settings_of_their_papers():
    frames = box(0, 255, 4, 84, 84, **UINT8)
    nature = network("cnn", frames, 6).init()
    assert [tuple(x.shape) for x in nature.values() if x.ndim == 4] == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert sum(x.numel() for x in nature.values()) == 1_687_206, "Mnih et al. 2015, for 6 actions"
    impala = network("impala", box(0, 255, 72, 96, 3, **UINT8), 9).init()
    assert sum(x.ndim == 4 for x in impala.values()) == 15, "15 convolutions, Espeholt et al. 2018, figure 3"
    assert impala["head.0.weight"].shape == (256, 32 * 9 * 12)


def test_a_residual_block_adds_its_input():
    net = network(block("impala", channels=[4]), IMAGE)
    weights, image = net.init(), images(2)
    zeroed = weights.apply(lambda x: x, inplace=False)
    for name in weights.keys():  # noqa: SIM118
        if ".layers." in name:
            zeroed[name] = torch.zeros_like(weights[name])
    x = image.permute(0, 3, 1, 2).float() / 255.0
    x = F.conv2d(x, weights["convolutions.0.weight"], weights["convolutions.0.bias"], padding=1)
    x = F.max_pool2d(x, 3, 2, 1).relu().flatten(1)
    x = F.linear(x, weights["head.0.weight"], weights["head.0.bias"]).relu()
    close(net.forward(zeroed, image), F.linear(x, weights["head.2.weight"], weights["head.2.bias"]))


LAYOUTS = {
    "channels first": (box(0, 255, 3, 12, 10, **UINT8), lambda x: x.movedim(-1, 1)),
    "floats": (box(0.0, 1.0, 12, 10, 3), lambda x: x.float() / 255.0),
    "int32": (box(0, 255, 12, 10, 3, dtype=torch.int32), lambda x: x.int()),
    "frames [h, w]": (stacked_space(box(0, 255, 12, 10, **UINT8), 3), lambda x: x.movedim(-1, 1)),
    "half": (box(0.0, 1.0, 12, 10, 3, dtype=torch.float16), lambda x: (x.float() / 255.0).half()),
    "double": (box(0.0, 1.0, 12, 10, 3, dtype=torch.float64), lambda x: x.double() / 255.0),
    "frames [h, w, 1]": (stacked_space(box(0, 255, 12, 10, 1, **UINT8), 3), lambda x: x.movedim(-1, 1).unsqueeze(-1)),
    "frames [1, h, w]": (stacked_space(box(0, 255, 1, 12, 10, **UINT8), 3), lambda x: x.movedim(-1, 1).unsqueeze(2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SMALL)
def test_every_layout_gives_the_same_numbers(name, layout):
    space, change = LAYOUTS[layout]
    net, other = network(block(name), IMAGE), network(block(name), space)
    weights, image = net.init(), images(3)
    close(other.forward(weights, change(image)), net.forward(weights, image), tol=1e-2 if layout == "half" else 1e-5)


def test_small_integers_are_divided_by_their_bound():
    bits, bytes_ = box(0, 1, 12, 10, 3, **UINT8), images(3) // 255
    net, other = network(block("cnn"), bits), network(block("cnn"), IMAGE)
    weights = net.init()
    close(net.forward(weights, bytes_), other.forward(weights, 255 * bytes_))


def test_a_grey_image_needs_no_axis_of_channels():
    grey, flat = box(0, 255, 12, 10, 1, **UINT8), box(0, 255, 12, 10, **UINT8)
    weights, image = network(block("cnn"), grey).init(), images(2, space=grey)
    close(
        network(block("cnn"), flat).forward(weights, image[..., 0]), network(block("cnn"), grey).forward(weights, image)
    )


def test_a_keypoint_is_the_position_of_a_bright_pixel():
    """A convolution that copies the first channel, and a head that copies the keypoints."""
    space = box(0, 255, 9, 5, 1, **UINT8)
    settings = {"channels": [1], "kernel_sizes": [3], "strides": [1], "hidden_sizes": []}
    net = network({"type": "keypoints", "network_cfg": settings}, space)
    weights = net.init()
    (conv,) = (name for name, x in weights.items() if x.ndim == 4)
    kernel = torch.zeros(1, 1, 3, 3)
    kernel[0, 0, 1, 1] = 1000.0
    head = {"head.0.weight": torch.eye(2), "head.0.bias": torch.zeros(2)}
    weights = weights.update({conv: kernel, "keypoints.of_image.temperature": torch.tensor([100.0]), **head})
    for row, column in ((0, 0), (4, 2), (8, 4), (2, 1)):
        image = torch.zeros(1, 9, 5, 1, dtype=torch.uint8)
        image[0, row, column] = 255
        close(net.forward(weights, image)[0], [column / 2 - 1, row / 4 - 1])


def test_new_keypoints_differ_between_images():
    """Without standardised features, the keypoints of all images would be nearly equal at first."""
    net = network(block("keypoints", hidden_sizes=[]), IMAGE, 8)
    weights = net.init().update({"head.0.weight": torch.eye(8), "head.0.bias": torch.zeros(8)})
    assert net.forward(weights, images(50)).std(0).min() > 0.02


def test_other_observations_scale_and_shift_the_features_of_keypoints():
    net = network(block("keypoints"), BOTH)
    weights, obs = net.init(), observations(3)
    plain = network(block("keypoints"), dict_space({"camera": IMAGE}))
    with_zero = weights.apply(lambda x: x, inplace=False)
    for name in weights.keys():  # noqa: SIM118
        if ".films." in name or ".sharpen." in name:
            with_zero[name] = torch.zeros_like(weights[name])
    with_zero["head.0.weight"] = weights["head.0.weight"].clone()
    with_zero["head.0.weight"][:, -4:] = 0.0
    unused = (name for name in weights.keys() if ".films." in name or ".sharpen." in name)  # noqa: SIM118
    alone = with_zero.exclude(*unused)
    alone["head.0.weight"] = alone["head.0.weight"][:, :-4]
    close(net.forward(with_zero, obs), plain.forward(alone, obs))
    assert not torch.allclose(net.forward(weights, obs), net.forward(with_zero, obs))


def test_every_weight_of_keypoints_changes_the_output():
    """A shift of a softmax would change nothing, and its gradient would be noise."""
    for space, obs in ((IMAGE, images(3)), (BOTH, observations(3))):
        for norm in (False, True):
            net = network(block("keypoints", use_layernorm=norm), space)
            weights = net.init().apply(lambda x: x.requires_grad_())
            net.forward(weights, obs).square().sum().backward()
            for name, x in weights.items():
                assert x.grad.abs().max() > 1e-7, name


def test_encoders_are_fused_by_hand():
    encoders = {
        "camera": block("cnn") | {"features": 6},
        "joints": {"network_cfg": {"hidden_sizes": []}, "features": 3},
    }
    net = network({"type": "fused", "network_cfg": {"encoders": encoders, "hidden_sizes": []}}, BOTH)
    weights, obs = net.init(), observations(5)

    def part(name):
        prefix = f"encoders.of_{name}.network."
        found = {key.removeprefix(prefix): x for key, x in weights.items() if key.startswith(prefix)}
        return TensorDict(found, [])

    camera = network(block("cnn"), IMAGE, 6).forward(part("camera"), obs["camera"]).relu()
    joints = network({"network_cfg": {"hidden_sizes": []}}, VECTOR, 3).forward(part("joints"), obs["joints"]).relu()
    features = torch.cat((camera, joints), -1)
    close(net.forward(weights, obs), F.linear(features, weights["trunk.0.weight"], weights["trunk.0.bias"]))


def test_an_encoder_without_activation_is_linear():
    for activation, low in (("relu", 0.0), (None, -10.0)):
        encoders = {"joints": {"network_cfg": {"hidden_sizes": []}, "features": 64, "activation": activation}}
        space = dict_space({"joints": VECTOR})
        net = network({"type": "fused", "network_cfg": {"encoders": encoders, "hidden_sizes": []}}, space, 64)
        weights = net.init().update({"trunk.0.weight": torch.eye(64), "trunk.0.bias": torch.zeros(64)})
        assert (net.forward(weights, observations(9)).min() < 0.0) == (low < 0.0)


def test_fused_reads_images_with_a_cnn_and_vectors_as_they_are():
    space = dict_space({"camera": box(0, 255, 36, 36, 3, **UINT8), "joints": VECTOR, "gear": Discrete(3)})
    weights = network("fused", space).init()
    assert weights["trunk.0.weight"].shape == (256, 256 + 4 + 3)
    assert weights["encoders.of_camera.network.convolutions.0.weight"].shape == (32, 3, 8, 8)


def test_names_of_observations_may_have_dots():
    space = dict_space({"arm.camera": IMAGE, "arm_camera": IMAGE, "arm%2Ecamera": IMAGE})
    for cfg in (
        block("keypoints"),
        {"type": "fused", "network_cfg": {"encoders": {n: block("cnn") for n, _ in space.items}}},
    ):
        net = network(cfg, space)
        obs = TensorDict({name: images(2, seed=i) for i, (name, _) in enumerate(space.items)}, [2])
        assert net.forward(net.init(), obs).shape == (2, 2)


def test_an_encoder_of_a_dict_inside_the_dict_reads_its_images():
    encoders = {"arm": block("keypoints") | {"features": 6}, "camera": block("cnn") | {"features": 6}}
    net = network({"type": "fused", "network_cfg": {"encoders": encoders}}, NESTED)
    obs = TensorDict({"arm": observations(2), "camera": images(2)}, [2])
    assert net.forward(net.init(), obs).shape == (2, 2)


def test_vectors_and_matrices_in_a_dict_are_no_images():
    """A stack of vectors, and a matrix of floats, have the shape of an image but are read as they are."""
    parts = {"gate": stacked_space(box(0.0, 1.0, 6), 4), "matrix": box(0.0, 1.0, 3, 3), "count": box(0, 9, 3, **UINT8)}
    space = dict_space({"camera": IMAGE, **parts})
    weights = network(block("keypoints"), space).init()
    assert {name.split(".")[1] for name in weights.keys() if name.startswith("keypoints")} == {"of_camera"}  # noqa: SIM118
    assert weights["head.0.weight"].shape[1] == 2 * 4 + 24 + 9 + 3
    encoders = {"camera": block("cnn") | {"features": 6}}
    fused = network({"type": "fused", "network_cfg": {"encoders": encoders}}, space).init()
    assert fused["trunk.0.weight"].shape[1] == 6 + 24 + 9 + 3
    encoders["matrix"] = block("cnn", kernel_sizes=[2, 2], strides=[1, 1])
    explicit = network({"type": "fused", "network_cfg": {"encoders": encoders}}, space).init()
    assert explicit["encoders.of_matrix.network.convolutions.0.weight"].shape == (4, 1, 2, 2)


def test_a_stack_of_small_images_keeps_its_axes():
    """The number of frames is above the width, and must not be taken for it."""
    assert channel_shape(stacked_space(box(0.0, 1.0, 6, 6), 8)) == (8, 6, 6)
    assert channel_shape(stacked_space(box(0.0, 1.0, 6, 5, 3), 8)) == (24, 6, 5)


def test_a_perceptron_scales_the_images_of_a_stack():
    for shape in ((2, 2, 1), (1, 2, 2)):
        space = stacked_space(box(0, 255, *shape, **UINT8), 4)
        assert flatten(torch.full((1, 4, *shape), 255, dtype=torch.uint8), space).max() == 1.0


@pytest.mark.parametrize("name", SMALL)
def test_initial_weights_are_orthogonal(name):
    weights = network(block(name, orthogonal_init=[2.0, 0.5]), IMAGE).init()
    matrices = [x.flatten(1) for x in weights.values() if x.ndim > 1]
    for gain, matrix in [*((2.0, m) for m in matrices[:-1]), (0.5, matrices[-1])]:
        matrix = matrix if len(matrix) <= matrix.shape[1] else matrix.t()
        close(matrix @ matrix.t(), gain**2 * torch.eye(len(matrix)))
    assert not any(x.any() for name, x in weights.items() if name.endswith("bias"))


@pytest.mark.parametrize("gains", [[1.0, 1.0, 1.0], 0.0, [1.0, -1.0], "high"])
@pytest.mark.parametrize("name", SMALL)
def test_wrong_gains_are_refused_in_one_line(name, gains):
    with pytest.raises(ConfigError) as error:
        validate_section(NetworkConfig, block(name, orthogonal_init=gains), "actor")
    expected = "expected a number above 0, or a list of two such numbers, the second for the output layer"
    assert str(error.value) == f"actor: network_cfg.orthogonal_init: {expected}"


@pytest.mark.parametrize("name", SMALL)
def test_the_settings_of_the_layers_matter(name):
    def described(**settings):
        return str(network(block(name, **settings), IMAGE).module)

    for settings in (
        {"activation": "tanh"},
        {"last_activation": "tanh"},
        {"use_layernorm": True},
        {"hidden_sizes": [3]},
    ):
        assert described(**settings) != described()
    net = network(block(name, last_activation="tanh"), IMAGE)
    assert net.forward(net.init().apply(lambda x: 100.0 * x), images(4)).abs().max() <= 1.0


KNOWN = ("mlp", "cnn", "impala", "keypoints", "fused")
NESTED = dict_space({"arm": BOTH, "camera": IMAGE})
CHANNELS = box(0, 255, 4, 4, 3, **UINT8)
EXPECTED = "expected an image [h, w], [h, w, c] or [c, h, w], of integers from 0 or of floats from 0 to 1, got"
FLOATS = "expected integers from 0 or floats from 0 to 1 for the image 'second', got a Box [8, 8, 3] of float32 from 0"
TWO = dict_space({"camera": IMAGE, "second": box(0.0, 255.0, 8, 8, 3)})
REFUSED = [
    ("cnn", VECTOR, f'.type: cnn {EXPECTED} a Box [4] of float32 from -1 to 1; use "mlp"'),
    ("impala", Discrete(3), f'.type: impala {EXPECTED} a Discrete; use "mlp"'),
    ("cnn", BOTH, f'.type: cnn {EXPECTED} a Dict; use "fused" for several observations'),
    ("cnn", dict_space({"joints": VECTOR}), f'.type: cnn {EXPECTED} a Box [4] of float32 from -1 to 1; use "mlp"'),
    ("cnn", dict_space({"c": box(-1.0, 1.0, 8, 8, 3)}), f".type: cnn {EXPECTED} a Box [8, 8, 3] of float32 from -1"),
    ("cnn", box(0, 255, 2, 8, 8, 3, **UINT8), f".type: cnn {EXPECTED} a Box [2, 8, 8, 3] of uint8 from 0 to 255; use"),
    ("keypoints", NESTED, ".type: keypoints expected images at the top level of the Dict, got an image inside 'arm';"),
    ("fused", NESTED, ".network_cfg.encoders: the network reads an image inside 'arm', which has no encoder; set"),
    *((name, dict_space({}), ": the observations have nothing that a network reads; select other") for name in KNOWN),
    ("cnn", box(-1.0, 1.0, 8, 8, 3), f".type: cnn {EXPECTED} a Box [8, 8, 3] of float32 from -1 to 1; scale the image"),
    ("cnn", box(0.0, 255.0, 8, 8), f".type: cnn {EXPECTED} a Box [8, 8] of float32 from 0 to 255; scale the image"),
    ("cnn", box(3, 9, 8, 8, **UINT8), f".type: cnn {EXPECTED} a Box [8, 8] of uint8 from 3 to 9; scale the image"),
    (
        "keypoints",
        dict_space({"joints": VECTOR}),
        ".type: keypoints expected at least one image, got joints: a Box [4] of",
    ),
    (
        "fused",
        IMAGE,
        '.type: fused expected a Dict of observations, got a Box [12, 10, 3] of uint8 from 0 to 255; use "cnn"',
    ),
    ("keypoints", TWO, f".type: keypoints {FLOATS} to 255; scale it and give its space these bounds, or flatten it"),
    ("fused", TWO, f".type: fused {FLOATS} to 255; scale it and give its space these bounds, or flatten it"),
    (block("cnn", kernel_sizes=[4, 6]), IMAGE, ".network_cfg.kernel_sizes[1]: 6 is above the 5x4 pixels that the"),
    ("cnn", CHANNELS, ".network_cfg.kernel_sizes[0]: 8 is above the 4x4 pixels that the convolution receives from"),
    (
        {"type": "fused", "network_cfg": {"encoders": {"camra": "cnn"}}},
        BOTH,
        ".network_cfg.encoders.camra: the observations have no 'camra'; did you mean 'camera'?",
    ),
    (
        {"type": "fused", "network_cfg": {"encoders": {"camera": block("cnn"), "joints": "cnn"}}},
        BOTH,
        f".network_cfg.encoders.joints.type: cnn {EXPECTED} a Box [4]",
    ),
    (
        {"type": "fused", "network_cfg": {"encoders": {"camera": block("cnn", strides=[9, 9])}}},
        BOTH,
        ".network_cfg.encoders.camera.network_cfg.kernel_sizes[1]: 3 is above the 1x1 pixels",
    ),
]


@pytest.mark.parametrize(("cfg", "space", "message"), REFUSED)
def test_spaces_that_do_not_fit_are_refused(cfg, space, message):
    with pytest.raises(ConfigError) as error:
        network(cfg, space)
    assert str(error.value).startswith(f"policy.actor{message}") and "\n" not in str(error.value)


WRONG_SETTINGS = [
    (block("cnn", strides=[1]), "channels, kernel_sizes and strides have 2, 2 and 1 entries; give one entry per"),
    (block("keypoints", strides=[1]), "channels, kernel_sizes and strides have 2, 2 and 1 entries"),
    (block("keypoints", kernel_sizes=[3, 4]), "kernel_sizes: 4 is even; use odd kernel sizes for keypoints"),
    ("cn", "did you mean 'cnn'?"),
]


@pytest.mark.parametrize(("cfg", "message"), WRONG_SETTINGS)
def test_wrong_settings_are_refused(cfg, message):
    with pytest.raises(ConfigError) as error:
        make_policy({"name": "actor_only", "actor": cfg}, IMAGE, Discrete(2))
    assert message in str(error.value) and "policy: actor." in str(error.value) and "\n" not in str(error.value)


def test_frames_of_another_size_are_refused():
    policy = make_policy({"name": "actor_only", "actor": block("cnn")}, IMAGE, Discrete(2))
    params, empty = policy.init(rng.key(0)), TensorDict({}, [])
    with pytest.raises(
        ConfigError, match=r"^policy: an observation has the shape \[2, 12, 12, 3\], but the networks were"
    ):
        policy.act(params, empty, torch.zeros(2, 12, 12, 3, dtype=torch.uint8), None)


def sharing(encoder, **settings):
    return {"name": "actor_critic", "encoder": encoder, "actor": NET, "critic": NET, **settings}


POLICIES = {
    **{name: ({"name": "actor_critic", "actor": block(name), "critic": block(name)}, IMAGE) for name in SMALL},
    **{f"shared {name}": (sharing(block(name) | {"features": 6}), IMAGE) for name in SMALL},
    "shared mlp": (sharing(NET | {"features": 6}, normalize_obs=True), BOTH),
    "masked": (sharing(block("keypoints")), dict_space({**dict(BOTH.items), "action_mask": box(0, 1, 3)})),
    "asymmetric": (
        {
            "name": "actor_critic",
            "actor": block("cnn"),
            "critic": NET,
            "actor_obs": ["camera"],
            "critic_obs": ["joints"],
        },
        BOTH,
    ),
    "recurrent": (
        {"name": "recurrent", "encoder": block("keypoints"), "actor": NET, "critic": NET, "cell": {"hidden_size": 5}},
        BOTH,
    ),
    "dueling": ({"name": "q_network", "critic": block("cnn"), "dueling": True}, IMAGE),
    "noisy": ({"name": "q_network", "critic": block("impala"), "noisy": True}, IMAGE),
}


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_found_in_policies_with_images(name):
    cfg, space = POLICIES[name]
    assert check_policy(make_policy(cfg, space, Discrete(3)), space, Discrete(3)).findings == []


@pytest.mark.parametrize("policy", ["deterministic_actor_critic", "squashed_actor_critic"])
def test_critics_of_actions_may_see_images(policy):
    fused = {
        "type": "fused",
        "network_cfg": {"encoders": {"camera": block("cnn") | {"features": 6}}, "hidden_sizes": [8]},
    }
    made = make_policy({"name": policy, "actor": fused, "critic": fused}, BOTH, VECTOR)
    assert check_policy(made, BOTH, VECTOR).findings == []


def rows_of_images():
    flags = {"action": torch.zeros(8, dtype=torch.int64), "done": torch.zeros(8, dtype=torch.bool)}
    return TensorDict({"obs": images(8), **flags}, [8])


def test_a_shared_encoder_runs_once_per_gradient_step():
    def convolutions(cfg):
        policy, rows = make_policy(cfg, IMAGE, Discrete(3)), rows_of_images()

        def loss(params):
            return sum(x.sum() for x in policy.evaluate_and_value_rows(params, rows))

        graph = graph_of(loss, policy.init(rng.key(0))).graph
        return sum("conv" in str(node.target) for node in graph.nodes if node.op == "call_function")

    apart = {"name": "actor_critic", "actor": block("cnn"), "critic": block("cnn")}
    assert convolutions(sharing(block("cnn"))) * 2 == convolutions(apart) > 0


def test_a_shared_encoder_gets_the_gradients_of_actor_and_critic():
    policy = make_policy(sharing(block("cnn")), IMAGE, Discrete(3))

    def grads(*picked):
        params = policy.init(rng.key(0)).apply(lambda x: x.requires_grad_())
        results = policy.evaluate_and_value_rows(params, rows_of_images())
        sum(results[i].square().sum() for i in picked).backward()
        return params["encoder", "network.convolutions.0.weight"].grad

    actor, critic, both = grads(0), grads(2), grads(0, 2)
    assert actor.any() and critic.any()
    close(both, actor + critic)


def test_actor_and_critic_with_one_encoder_read_the_same_observations():
    with pytest.raises(
        ConfigError, match="critic_obs: actor and critic share an encoder, so both read the observations"
    ):
        make_policy(sharing(block("cnn"), actor_obs=["camera"], critic_obs=["joints"]), BOTH, Discrete(2))
    settings = sharing(block("keypoints"), actor_obs=["camera"], critic_obs=["camera"])
    params = make_policy(settings, BOTH, Discrete(2)).init(rng.key(0))
    assert not any("films" in name for name in params["encoder"].keys()), "the joints are not read"  # noqa: SIM118


def test_a_plain_name_and_a_block_are_equal():
    plain, whole = (NetworkConfig.model_validate(x) for x in ("cnn", {"type": "cnn", "network_cfg": {}}))
    assert plain == whole and plain.network_cfg == CNNConfig()
    assert NetworkConfig.model_validate("mlp").network_cfg.hidden_sizes == (64, 64)
