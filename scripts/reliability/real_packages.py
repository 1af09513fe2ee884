"""Runs packages that people use with PyTorch in a pool, and compares losses and gradients with the
serial loop.

Each package is used as its documentation shows it, in up to three situations:

    function    a function of the script calls the package, and captures a tensor
    captured    the function captures an object of the package: a module, a sampler, a setting
    objects     items are objects of the package, or results

Each situation is mapped three times, in one pool and in one executor: twice as it is, and once
after the captured objects have changed. Every map must agree with the loop. Losses and the
gradients of items must be equal bit for bit, and gradients of captures up to rounding. The leaves
that get gradients are those that autograd finds behind the loop's losses, so none can be forgotten.

A situation that mpgrad refuses on purpose is "refused", with the message. Any other error of a map
counts as a difference. Packages that are not installed are left out.

    python scripts/reliability/real_packages.py --packages gpytorch tensordict
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose modules are shared

from common import print_surroundings, surroundings

import mpgrad

EPILOG = (
    "exit status: 0 if all installed packages agree with the loop, or are refused on purpose, "
    "1 if anything differs, 2 for wrong arguments"
)

PROCESSES = 2
ITEMS = 3
STEP = 0.125  # by which parameters are changed
ROUNDING = 1e-9  # relative, of sums in double precision


# --- situations


def same(result: Any) -> Any:
    return result


@dataclasses.dataclass
class Situation:
    """A function and its items.

    `change` changes what the function captures, and `loss_in` finds the loss in a result. Losses
    and gradients of items may differ by `rounding`, relatively. `refused` is part of the message
    if mpgrad refuses the situation.
    """

    kind: str
    function: Callable[[Any], Any]
    items: Sequence[Any]
    change: Callable[[], object]
    loss_in: Callable[[Any], Any] = same
    rounding: float = 0.0
    refused: str = ""


Situations = Iterator[Situation]
Package = Callable[..., Situations]
PACKAGES: dict[str, tuple[Package, Sequence[str]]] = {}


def package(name: str, *modules: str) -> Callable[[Package], Package]:
    """Decorate a function that gets these modules, or by default the module with the package's
    name."""

    def add(made: Package) -> Package:
        PACKAGES[name] = made, modules or (name,)
        return made

    return add


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape, requires_grad=True)


def leaves(*shape: int) -> list[Tensor]:
    return [leaf(*shape) for _ in range(ITEMS)]


def nudge(*captured: Tensor | nn.Module) -> Callable[[], None]:
    """Return a function that changes the captures as an optimizer does."""

    @torch.no_grad()
    def change() -> None:
        for each in captured:
            for tensor in each.parameters() if isinstance(each, nn.Module) else [each]:
                tensor.add_(STEP)

    return change


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = small_net()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def small_net(inputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 1))


# --- numerics


@package("torchdiffeq")
def differential_equations(torchdiffeq: Any) -> Situations:
    times, rate = torch.linspace(0, 1, 4), leaf(3)

    def decayed(x: Tensor) -> Tensor:
        return torchdiffeq.odeint(lambda t, y: -rate * y, x, times)[-1].sum()

    yield Situation("function", decayed, leaves(3), nudge(rate))

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3)

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(self.net(y)) * t

    field = Field()

    def flown(x: Tensor) -> Tensor:
        return torchdiffeq.odeint_adjoint(field, x, times, rtol=1e-6)[-1].square().sum()

    yield Situation("captured", flown, leaves(3), nudge(field))


@package("torchsde")
def stochastic_equations(torchsde: Any) -> Situations:
    class Motion(torchsde.SDEIto):
        def __init__(self) -> None:
            super().__init__(noise_type="diagonal")
            self.drift = nn.Linear(2, 2)

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            return self.drift(y)

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            return 0.3 * y

    motion, times = Motion(), torch.linspace(0, 1, 3)

    def noise(entropy: int) -> Any:
        return torchsde.BrownianInterval(
            0.0, 1.0, size=(4, 2), entropy=entropy, levy_area_approximation="space-time"
        )

    def moved(y: Tensor) -> Tensor:
        return torchsde.sdeint(motion, y, times, bm=noise(5), dt=0.25)[-1].sum()

    yield Situation("captured", moved, leaves(4, 2), nudge(motion))

    start = leaf(4, 2)

    def along(path: Any) -> Tensor:
        return torchsde.sdeint(motion, start, times, bm=path, dt=0.25)[-1].sum()

    yield Situation("objects", along, [noise(each) for each in range(ITEMS)], nudge(start))


@package("linear_operator", "linear_operator.operators")
def operators(operators: Any) -> Situations:
    shift = leaf(4)

    def fitted(x: Tensor) -> Tensor:
        dense = operators.DenseLinearOperator(x @ x.mT + 4 * torch.eye(4))
        quadratic, logdet = dense.inv_quad_logdet(shift[:, None], logdet=True)
        return quadratic + logdet

    yield Situation("function", fitted, leaves(4, 4), nudge(shift))

    def solved(operator: Any) -> Tensor:
        return operator.add_jitter(1.0).solve(shift).sum()

    diagonals = [operators.DiagLinearOperator(each) for each in leaves(4)]
    yield Situation("objects", solved, diagonals, nudge(shift))


@package("gpytorch")
def gaussian_processes(gpytorch: Any) -> Situations:
    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x = torch.linspace(0, 1, 6)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(x, x.sin(), likelihood)
    likelihood_of_all = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def marginal(y: Tensor) -> Tensor:
        return -likelihood_of_all(model(x), y)

    yield Situation("captured", marginal, leaves(6), nudge(model))

    def predicted(y: Tensor) -> Any:
        model.eval()
        return model(y)

    yield Situation("objects", predicted, leaves(2), nudge(model), lambda each: each.mean.sum())


@package("botorch")
def bayesian_optimization(botorch: Any) -> Situations:
    x = torch.rand(6, 2)
    model = botorch.models.SingleTaskGP(x, x.sum(1, keepdim=True).sin())
    gain = botorch.acquisition.LogExpectedImprovement(model, best_f=0.5)

    def improvement(candidate: Tensor) -> Tensor:
        return gain(candidate).sum()

    yield Situation("captured", improvement, leaves(1, 2), nudge(model))
    yield Situation(
        "objects", model.posterior, leaves(2, 2), nudge(model), lambda each: each.mean.sum()
    )


@package("geoopt")
def manifolds(geoopt: Any) -> Situations:
    ball, point = geoopt.PoincareBall(), torch.full((2,), 0.1, requires_grad=True)

    def distance(x: Tensor) -> Tensor:
        return ball.dist(ball.expmap0(x), point)

    # geoopt's functions are TorchScript, which each process optimises after some runs
    yield Situation("function", distance, leaves(2), nudge(point), rounding=ROUNDING)
    place = geoopt.ManifoldParameter(torch.full((2,), 0.2), manifold=ball)
    yield Situation(
        "captured",
        lambda x: place.manifold.dist(ball.expmap0(x), place),
        leaves(2),
        nudge(place),
        rounding=ROUNDING,
    )
    points = [
        geoopt.ManifoldParameter(torch.full((2,), 0.1 * each), manifold=geoopt.PoincareBall())
        for each in range(1, ITEMS + 1)
    ]
    yield Situation(
        "objects",
        lambda each: each.manifold.dist(each, place),
        points,
        nudge(place),
        rounding=ROUNDING,
    )


@package("e3nn", "e3nn.o3")
def equivariant_nets(o3: Any) -> Situations:
    weight = leaf(4)

    def harmonics(x: Tensor) -> Tensor:
        return (o3.spherical_harmonics([0, 1], x, normalize=True) * weight).sum()

    yield Situation("function", harmonics, leaves(3), nudge(weight))
    product = o3.FullyConnectedTensorProduct("2x0e + 1o", "0e + 1o", "3x0e")

    def multiplied(x: Tensor) -> Tensor:
        return product(x, x[:, :4]).square().sum()

    yield Situation("captured", multiplied, leaves(2, 5), nudge(product))
    irreps = [o3.Irreps(each) for each in ("2x0e", "1o", "0e + 1o")]
    yield Situation("objects", lambda each: each.dim * weight.sum(), irreps, nudge(weight))


@package("pytorch-minimize", "torchmin")
def minimization(torchmin: Any) -> Situations:
    target = leaf(2)

    def reached(x: Tensor) -> Any:
        found = torchmin.minimize(
            lambda y: (y - target.detach()).pow(4).sum(), x.detach(), method="bfgs", max_iter=5
        )
        return ((found.x + x) * target).sum()

    yield Situation("function", reached, leaves(2), nudge(target))


@package("torchquad")
def integrals(torchquad: Any) -> Situations:
    rate = leaf(1)

    def area(end: Tensor) -> Tensor:
        domain = torch.stack([torch.zeros(()), end[0]])[None]
        return torchquad.Simpson().integrate(
            lambda x: (rate * x[:, 0]).exp(), dim=1, N=11, integration_domain=domain
        )

    yield Situation("function", area, leaves(1), nudge(rate))


@package("scipy", "scipy.sparse", "scipy.optimize")
def scientific(sparse: Any, optimize: Any) -> Situations:
    weight = leaf(3)

    def nearest(x: Tensor) -> Tensor:
        found = optimize.minimize(lambda y: ((y - 1) ** 2).sum(), x.detach().numpy())
        return (x * weight * torch.from_numpy(found.x)).sum()

    yield Situation("function", nearest, leaves(3), nudge(weight))
    matrices = [sparse.eye_array(3, k=each).tocsr() for each in range(ITEMS)]
    yield Situation(
        "objects",
        lambda a: weight @ torch.from_numpy(a.toarray()) @ weight,
        matrices,
        nudge(weight),
    )


@package("sympy")
def symbols(sympy: Any) -> Situations:
    x, a = sympy.symbols("x a")
    weight = leaf(1)
    formula = sympy.lambdify((x, a), a * sympy.sin(x) ** 2, modules=torch)
    yield Situation("captured", lambda each: formula(each, weight).sum(), leaves(2), nudge(weight))
    powers = [x**each + a for each in range(1, ITEMS + 1)]

    def valued(expression: Any) -> Tensor:
        return sympy.lambdify((x, a), expression, modules=torch)(weight, 2.0).sum()

    yield Situation("objects", valued, powers, nudge(weight))


# --- probability


def flow_situations(flow: nn.Module, features: int) -> Situations:
    def unlikely(x: Tensor) -> Tensor:
        return -flow.log_prob(x).mean()  # type: ignore[operator]

    yield Situation("captured", unlikely, leaves(5, features), nudge(flow))


@package("normflows")
def normalizing_flows(normflows: Any) -> Situations:
    half = torch.tensor([0.0, 1.0])
    flows = [
        normflows.flows.MaskedAffineFlow(
            each, normflows.nets.MLP([2, 4, 2]), normflows.nets.MLP([2, 4, 2])
        )
        for each in (half, 1 - half)
    ]
    base = normflows.distributions.base.DiagGaussian(2)
    yield from flow_situations(normflows.NormalizingFlow(base, flows), 2)


@package("nflows", "nflows.flows", "nflows.transforms", "nflows.distributions")
def neural_flows(flows: Any, transforms: Any, distributions: Any) -> Situations:
    transform = transforms.CompositeTransform(
        [
            transforms.ReversePermutation(3),
            transforms.MaskedAffineAutoregressiveTransform(features=3, hidden_features=4),
        ]
    )
    yield from flow_situations(flows.Flow(transform, distributions.StandardNormal([3])), 3)


@package("zuko")
def conditional_flows(zuko: Any) -> Situations:
    flow = zuko.flows.NSF(features=2, context=3, transforms=2, hidden_features=(4, 4))
    point = torch.full((2,), 0.5)

    def unlikely(context: Tensor) -> Tensor:
        return -flow(context).log_prob(point)

    yield Situation("captured", unlikely, leaves(3), nudge(flow))
    means = [zuko.distributions.DiagNormal(each, torch.ones(2)) for each in leaves(2)]
    weight = leaf(2)
    yield Situation("objects", lambda each: each.log_prob(weight), means, nudge(weight))
    yield Situation(
        "objects",
        lambda x: zuko.distributions.DiagNormal(x, weight.exp()),
        leaves(2),
        nudge(weight),
        lambda made: made.log_prob(point),
    )


@package("pyro-ppl", "pyro", "pyro.distributions", "pyro.nn")
def probabilistic_programs(pyro: Any, dist: Any, nn_of_pyro: Any) -> Situations:
    place = leaf(1)

    def model(x: Tensor) -> None:
        drawn = pyro.sample("drawn", dist.Normal(place, 1.0), obs=torch.ones(1))
        pyro.sample("seen", dist.Normal(drawn, 1.0), obs=x)

    def unlikely(x: Tensor) -> Tensor:
        return -pyro.poutine.trace(model).get_trace(x).log_prob_sum()

    yield Situation("function", unlikely, leaves(1), nudge(place))
    laws = [dist.Normal(each, 1.0).expand([2]).to_event(1) for each in leaves(1)]
    yield Situation("objects", lambda law: law.log_prob(place.expand(2)), laws, nudge(place))

    class Regression(nn_of_pyro.PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn_of_pyro.PyroParam(torch.rand(2))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    # the parameters are in a table of pyro's
    regression = Regression()
    weight = regression.weight
    yield Situation("captured", regression, leaves(2), nudge(weight), refused="would be lost")


# --- nets and their training


@package("higher")
def inner_loops(higher: Any) -> Situations:
    net = small_net()

    def adapted(x: Tensor) -> Tensor:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (inner, steps):
            for _ in range(2):
                steps.step(inner(x).square().mean())
            return inner(x).square().mean()

    yield Situation("captured", adapted, leaves(4, 3), nudge(net))


@package("einops", "einops", "einops.layers.torch")
def rearranging(einops: Any, layers: Any) -> Situations:
    weight = leaf(4)

    def pooled(x: Tensor) -> Tensor:
        rows = einops.rearrange(x, "(h a) (w b) -> h w (a b)", a=2, b=2)
        return einops.einsum(rows, weight, "h w c, c -> h w").square().sum()

    yield Situation("function", pooled, leaves(4, 4), nudge(weight))
    net = nn.Sequential(
        layers.Rearrange("b (c d) -> b d c", c=3), layers.Reduce("b d c -> b c", "max"), small_net()
    )
    mixing = layers.EinMix("b i -> b o", weight_shape="i o", bias_shape="o", i=6, o=6)
    yield Situation("captured", lambda x: net(mixing(x)).sum(), leaves(2, 6), nudge(net, mixing))


@package("tensordict", "tensordict", "tensordict.nn")
def dictionaries(tensordict: Any, nn_of_tensordict: Any) -> Situations:
    module = nn_of_tensordict.TensorDictModule(small_net(), in_keys=["x"], out_keys=["y"])

    def mapped(x: Tensor) -> Tensor:
        return module(tensordict.TensorDict({"x": x}, batch_size=[2]))["y"].sum()

    yield Situation("captured", mapped, leaves(2, 3), nudge(module))
    parameters = nn_of_tensordict.TensorDictParams(tensordict.from_module(small_net()))
    net = small_net()

    def called(x: Tensor) -> Tensor:
        with parameters.to_module(net):
            return net(x).sum()

    yield Situation("captured", called, leaves(2, 3), nudge(parameters))
    items = [
        tensordict.TensorDict({"x": each, "deep": {"name": "a"}}, batch_size=[2])
        for each in leaves(2, 3)
    ]
    yield Situation("objects", module, items, nudge(module), lambda result: result["y"].sum())


@package("kornia")
def vision(kornia: Any) -> Situations:
    sigma = torch.tensor([[1.0, 2.0]], requires_grad=True)

    def blurred(image: Tensor) -> Tensor:
        return kornia.filters.gaussian_blur2d(image, (3, 3), sigma).square().sum()

    yield Situation("function", blurred, leaves(1, 1, 6, 6), nudge(sigma))
    target = leaf(1, 1, 6, 6)
    likeness = kornia.losses.SSIMLoss(3)
    blur = kornia.filters.GaussianBlur2d((3, 3), (1.0, 1.0))
    yield Situation(
        "captured", lambda each: likeness(blur(each), target), leaves(1, 1, 6, 6), nudge(target)
    )


@package("captum", "captum.attr")
def attributions(attr: Any) -> Situations:
    net = small_net()
    gradients, layer = attr.IntegratedGradients(net), attr.LayerActivation(net, net[0])

    def attributed(x: Tensor) -> Tensor:
        return gradients.attribute(x, n_steps=5).square().sum() + net(x).sum()

    yield Situation("captured", attributed, leaves(2, 3), nudge(net))
    yield Situation(
        "captured", lambda x: layer.attribute(x).sum() + net(x).sum(), leaves(2, 3), nudge(net)
    )


@package("torchmetrics")
def metrics(torchmetrics: Any) -> Situations:
    target, metric = leaf(5), torchmetrics.MeanSquaredError()
    yield Situation(
        "function",
        lambda x: torchmetrics.functional.pearson_corrcoef(x, target),
        leaves(5),
        nudge(target),
    )
    yield Situation("captured", lambda x: metric.clone()(x, target), leaves(5), nudge(target))
    seen = [torchmetrics.MeanSquaredError() for _ in range(ITEMS)]
    for each in seen:
        each.update(torch.rand(5), torch.rand(5))

    def one_more(metric: Any) -> Any:
        metric = metric.clone()
        metric.update(target.detach(), torch.ones(5))
        return metric

    yield Situation("objects", one_more, seen, nudge(target), lambda result: result.compute())


@package("torch-geometric", "torch_geometric.nn", "torch_geometric.data")
def graph_nets(nn_of_graphs: Any, data: Any) -> Situations:
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn_of_graphs.GCNConv(3, 4)
            self.attention = nn_of_graphs.GATConv(4, 2)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.attention(self.convolution(x, edges).relu(), edges)

    net = Net()
    yield Situation("captured", lambda x: net(x, edges).square().sum(), leaves(3, 3), nudge(net))
    graphs = [data.Data(x=each, edge_index=edges) for each in leaves(3, 3)]
    batches = [data.Batch.from_data_list([each, each.clone()]) for each in graphs]

    def pooled(graph: Any) -> Tensor:
        rows = net(graph.x, graph.edge_index)
        return nn_of_graphs.global_mean_pool(rows, graph.batch).square().sum()

    yield Situation("objects", pooled, [*graphs, *batches], nudge(net))

    def labelled(graph: Any) -> Any:
        graph = graph.clone()
        graph.y = net(graph.x, graph.edge_index)
        return graph

    yield Situation("objects", labelled, graphs, nudge(net), lambda result: result.y.sum())


@package("opacus")
def private_training(opacus: Any) -> Situations:
    module = opacus.GradSampleModule(small_net())
    yield Situation("captured", lambda x: module(x).square().sum(), leaves(2, 3), nudge(module))


@package("lightning")
def lightning_modules(lightning: Any) -> Situations:
    class Regression(lightning.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = small_net(width)

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

    module = Regression()
    y = torch.rand(2, 1)
    yield Situation(
        "captured", lambda x: module.training_step((x, y), 0), leaves(2, 3), nudge(module)
    )


@package("skorch")
def estimators(skorch: Any) -> Situations:
    estimator = skorch.NeuralNetRegressor(SmallNet, max_epochs=1).initialize()
    y = torch.rand(2, 1)

    def loss(x: Tensor) -> Tensor:
        return estimator.get_loss(estimator.infer(x), y, training=True)

    # an estimator pickles its module by itself, and so brings a copy of the parameters
    module = estimator.module_
    yield Situation("captured", loss, leaves(2, 3), nudge(module), refused="would be lost")


@package("transformers")
def language_models(transformers: Any) -> Situations:
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    words = torch.tensor([[1, 2, 3, 4]])

    def embedded(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, labels=words).loss

    yield Situation("captured", embedded, leaves(1, 4, 8), nudge(model))
    items = [transformers.BatchEncoding({"input_ids": words + each}) for each in range(ITEMS)]

    def answered(encoding: Any) -> Any:
        return model(**encoding, labels=words)

    yield Situation("objects", answered, items, nudge(model), lambda output: output.loss)


@package("torch-optimizer", "torch_optimizer")
def optimizers(torch_optimizer: Any) -> Situations:
    start = leaf(3)

    def trained(x: Tensor) -> Tensor:
        weight = start.detach().clone().requires_grad_()
        optimizer = torch_optimizer.DiffGrad([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (weight * x.detach()).sum().backward()
            optimizer.step()
        return (weight.detach() * x * start).sum()

    yield Situation("function", trained, leaves(3), nudge(start))


# --- data, settings, tools


def record_situations(settings: Any, made: Callable[[Tensor], Any]) -> Situations:
    """`settings` has a `scale`; `made` puts a tensor into the field `x` of a record."""

    def scaled(record: Any) -> Tensor:
        return (record.x * settings.scale).sum()

    def rescaled() -> None:
        settings.scale = settings.scale + 1.0

    yield Situation("captured", lambda x: (x * settings.scale).sum(), leaves(3), rescaled)
    yield Situation("objects", scaled, [made(each) for each in leaves(3)], rescaled)
    yield Situation(
        "objects",
        lambda x: made(x * settings.scale),
        leaves(3),
        rescaled,
        lambda result: result.x.sum(),
    )


@package("pydantic")
def checked_models(pydantic: Any) -> Situations:
    class Settings(pydantic.BaseModel):
        scale: float = pydantic.Field(default=2.0, gt=0)

    class Record(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        x: Tensor
        name: str = "a"

    Settings.model_rebuild(_types_namespace={})
    Record.model_rebuild(_types_namespace={"Tensor": Tensor})
    yield from record_situations(Settings(), lambda x: Record(x=x))


@package("msgspec")
def structs(msgspec: Any) -> Situations:
    class Settings(msgspec.Struct):
        scale: float = 2.0

    class Record(msgspec.Struct, frozen=True):
        x: Any
        name: str = "a"

    yield from record_situations(Settings(), lambda x: Record(x=x))


@package("attrs")
def classes_of_attrs(attrs: Any) -> Situations:
    @attrs.define
    class Settings:
        scale: float = attrs.field(default=2.0, validator=attrs.validators.gt(0))

    @attrs.frozen
    class Record:
        x: Any
        double: Any = attrs.field(init=False)

        @double.default
        def twice(self) -> Any:
            return self.x * 2

    yield from record_situations(Settings(), Record)


def attribute_dictionaries(made: Callable[[Any], Any]) -> Situations:
    settings, weight = made({"scale": 2.0, "deep": {"more": 1.0}}), leaf(3)

    def scaled(x: Tensor) -> Tensor:
        return (x * weight * settings.scale * settings.deep.more).sum()

    def rescaled() -> None:
        settings.deep.more = 3.0

    yield Situation("captured", scaled, leaves(3), rescaled)

    def product(record: Any) -> Tensor:
        return (record.x * record.deep.more * weight).sum()

    items = [made({"x": each, "deep": {"more": 1.0}}) for each in leaves(3)]
    yield Situation("objects", product, items, nudge(weight))
    yield Situation(
        "objects",
        lambda x: made({"x": x * weight, "deep": {"more": x}}),
        leaves(3),
        nudge(weight),
        lambda result: (result.x * result.deep.more).sum(),
    )


@package("python-box", "box")
def boxes(box: Any) -> Situations:
    yield from attribute_dictionaries(box.Box)


@package("munch")
def munches(munch: Any) -> Situations:
    yield from attribute_dictionaries(munch.munchify)


@package("addict")
def addicts(addict: Any) -> Situations:
    yield from attribute_dictionaries(addict.Dict)


@package("ml_collections")
def config_dictionaries(ml_collections: Any) -> Situations:
    yield from attribute_dictionaries(ml_collections.ConfigDict)


@package("pyrsistent")
def persistent_objects(pyrsistent: Any) -> Situations:
    class Record(pyrsistent.PClass):
        x = pyrsistent.field()
        scale = pyrsistent.field(initial=2.0)

    weight = leaf(3)
    table = pyrsistent.pmap({"weight": weight, "scales": pyrsistent.v(1.0, 2.0)})
    yield Situation(
        "captured",
        lambda x: (x * table["weight"] * table["scales"][1]).sum(),
        leaves(3),
        nudge(weight),
    )
    items = [Record(x=each) for each in leaves(3)]
    yield Situation("objects", lambda each: (each.x * weight).sum(), items, nudge(weight))
    yield Situation(
        "objects",
        lambda each: each.set(x=each.x * weight),
        items,
        nudge(weight),
        lambda result: (result.x * result.scale).sum(),
    )


@package("wrapt")
def wrappers(wrapt: Any) -> Situations:
    weight = leaf(3)

    @wrapt.decorator
    def doubled(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return 2 * wrapped(*args, **kwargs)

    @doubled
    def scaled(x: Tensor) -> Tensor:
        return (x * weight).sum()

    # wrapt does not allow pickling of the objects that it wraps
    yield Situation("function", scaled, leaves(3), nudge(weight), refused="must define __reduce")


@package("omegaconf")
def configurations(omegaconf: Any) -> Situations:
    settings = omegaconf.OmegaConf.create({"scale": 2.0, "twice": "${scale}"})
    weight = leaf(3)

    def rescaled() -> None:
        settings.scale += 1.0

    yield Situation("captured", lambda x: (x * settings.twice * weight).sum(), leaves(3), rescaled)
    items = [omegaconf.OmegaConf.create({"scale": each, "of": [1, 2]}) for each in range(ITEMS)]
    yield Situation(
        "objects", lambda each: (weight * each.scale * each.of[1]).sum(), items, nudge(weight)
    )


@package("hydra-core", "hydra.utils")
def instantiated(utils: Any) -> Situations:
    target = {"_target_": "torch.nn.Hardtanh", "min_val": -1.0, "max_val": 0.5}

    def clipped(x: Tensor) -> Tensor:
        return utils.instantiate(target)(x).sum()

    yield Situation("function", clipped, leaves(3), lambda: target.update(max_val=0.8))


@package("cachetools")
def caches(cachetools: Any) -> Situations:
    settings = SimpleNamespace(scale=2.0)
    weight = leaf(3)

    @cachetools.cached(cachetools.LRUCache(8))
    def power(number: int) -> int:
        return 2**number

    def scaled(x: Tensor) -> Tensor:
        return (x * weight * power(3) * settings.scale).sum()

    yield Situation("function", scaled, leaves(3), lambda: setattr(settings, "scale", 3.0))
    table = cachetools.TTLCache(8, ttl=600)
    table["weight"] = weight
    yield Situation(
        "captured",
        lambda x: (x * table["weight"]).sum(),
        leaves(3),
        lambda: table.update(weight=leaf(3)),
    )


@package("pint")
def units(pint: Any) -> Situations:
    weight, registry = leaf(1), pint.get_application_registry()

    def converted(x: Tensor) -> Tensor:
        return (x * registry.Quantity(2.0, "km").to("m").magnitude * weight).sum()

    yield Situation("function", converted, leaves(1), nudge(weight))
    lengths = [registry.Quantity(float(each), "cm") for each in range(ITEMS)]
    yield Situation(
        "objects", lambda each: each.to("m").magnitude * weight.sum(), lengths, nudge(weight)
    )
    own = pint.UnitRegistry()
    own.define("step = 2 cm")

    def stepped(x: Tensor) -> Tensor:
        return (x * own("1 step").to("m").magnitude).sum()

    yield Situation("captured", stepped, leaves(1), lambda: own.define("step = 3 cm"))


@package("loguru")
def logged(loguru: Any) -> Situations:
    weight = leaf(3)

    def told(x: Tensor) -> Tensor:
        loguru.logger.trace("{}", x.shape)
        return (x * weight).sum()

    yield Situation("function", told, leaves(3), nudge(weight))
    bound = loguru.logger.bind(run=1)

    def told_bound(x: Tensor) -> Tensor:
        bound.trace("a step")
        return (x * weight).sum()

    yield Situation("captured", told_bound, leaves(3), nudge(weight))


@package("pandas")
def tables(pandas: Any) -> Situations:
    table = pandas.DataFrame({"dose": [1.0, 2.0, 3.0], "who": ["a", "b", "a"]})

    def weighted(x: Tensor) -> Tensor:
        dose = table.groupby("who").dose.transform("sum").to_numpy(copy=True)
        return (x * torch.from_numpy(dose)).sum()

    def more() -> None:
        table.loc[0, "dose"] = 5.0

    yield Situation("captured", weighted, leaves(3), more)
    weight = leaf(3)
    frames = [table.assign(dose=table.dose * each) for each in range(ITEMS)]

    def summed(frame: Any) -> Tensor:
        return (weight * torch.from_numpy(frame.dose.to_numpy(copy=True))).sum()

    yield Situation("objects", summed, frames, nudge(weight))
    rows = [pandas.Series({"x": each, "name": "a"}, dtype=object) for each in leaves(3)]
    yield Situation("objects", lambda row: (row.x * weight).sum(), rows, nudge(weight))


@package("networkx")
def graphs(networkx: Any) -> Situations:
    weight = leaf(1)

    def weighted(x: Tensor) -> Any:
        graph = networkx.path_graph(3, create_using=networkx.DiGraph)
        for number, (_, _, edge) in enumerate(graph.edges(data=True)):
            edge["w"] = x[number]
        return graph

    def length(graph: Any) -> Tensor:
        return sum(edge["w"] for _, _, edge in graph.edges(data=True)) * weight.sum()

    yield Situation("objects", length, [weighted(each) for each in leaves(2)], nudge(weight))
    yield Situation("objects", lambda x: weighted(x * weight), leaves(2), nudge(weight), length)
    streets = weighted(leaf(2))
    streets.graph["toll"] = 1.0

    def travelled(x: Tensor) -> Tensor:
        path = networkx.shortest_path(streets, 0, 2)
        parts = [streets.edges[edge]["w"] for edge in itertools.pairwise(path)]
        return (x * sum(parts) * streets.graph["toll"]).sum()

    yield Situation("captured", travelled, leaves(2), lambda: streets.graph.update(toll=2.0))


@package("tqdm")
def progress(tqdm: Any) -> Situations:
    weight = leaf(3)

    def shown(x: Tensor) -> Tensor:
        return sum((x * weight).sum() for _ in tqdm.tqdm(range(2), disable=True))

    yield Situation("function", shown, leaves(3), nudge(weight))
    bar = tqdm.tqdm(total=3, disable=True)

    def counted(x: Tensor) -> Tensor:
        bar.update()
        return (x * weight).sum()

    yield Situation("captured", counted, leaves(3), nudge(weight))


# --- comparing


class Found(NamedTuple):
    """The results of a map or of the loop: losses, and gradients of all leaves behind the loop's
    losses."""

    losses: list[Tensor]
    gradients: list[Tensor | None]


def losses_of(situation: Situation, results: Iterable[Any]) -> list[Tensor]:
    return [torch.as_tensor(situation.loss_in(result)) for result in results]


def backward(losses: list[Tensor], leaves: Iterable[Tensor]) -> Found:
    """Run a backward from everything. Gradients of chosen tensors would not show that others are
    lost."""
    for each in leaves:
        each.grad = None
    with_gradients = [loss.sum() for loss in losses if loss.requires_grad]
    if with_gradients:
        torch.stack(with_gradients).sum().backward()  # type: ignore[no-untyped-call]
    return Found(losses, [each.grad for each in leaves])


def leaves_behind(loss: Tensor) -> dict[int, Tensor]:
    """Return all leaves that autograd finds behind the loss, by their id."""
    found, seen, nodes = {}, set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        nodes += [each for each, _ in node.next_functions]
    return found


def difference(situation: Situation, mapped: Callable[..., Iterable[Any]]) -> str:
    """Describe the difference between a map and the loop; return "" if there is none."""
    losses = losses_of(situation, map(situation.function, situation.items))
    behind = [leaves_behind(loss) for loss in losses]
    leaves = {key: each for one in behind for key, each in one.items()}
    loop = backward(losses, leaves.values())
    try:
        results = mapped(situation.function, situation.items)
        found = backward(losses_of(situation, results), leaves.values())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for index, (mine, other) in enumerate(zip(found.losses, loop.losses, strict=True)):
        if mine.requires_grad != other.requires_grad:
            return f"item {index}: requires_grad is {mine.requires_grad}"
        if not is_equal(mine, other, situation.rounding):
            return f"item {index}: {mine.detach()}, serially {other.detach()}"
    for key, mine, other in zip(leaves, found.gradients, loop.gradients, strict=True):
        is_captured = sum(key in one for one in behind) > 1
        if not is_equal(mine, other, ROUNDING if is_captured else situation.rounding):
            whose = "a capture" if is_captured else "an item"
            return f"the gradient of {whose} is {mine}, serially {other}"
    return ""


def is_equal(mine: Tensor | None, other: Tensor | None, rounding: float) -> bool:
    if mine is None or other is None:
        return mine is other
    return torch.allclose(mine.to_dense(), other.to_dense(), rtol=rounding, atol=rounding)


def verdict(situation: Situation, mapped: Callable[..., Iterable[Any]]) -> str:
    """Describe the outcome of three maps, the last one after the change."""
    for number, state in enumerate(("first", "unchanged", "changed")):
        if number == 2:
            situation.change()
        found = difference(situation, mapped)
        if found and situation.refused and situation.refused in found:
            return f"refused: {found}"
        if found:
            return f"different ({state}): {found}"
    return "same"


# --- the whole


def rows_of(name: str, pool: mpgrad.Pool, executor: mpgrad.Executor) -> Iterator[Sequence[str]]:
    """Yield the situation, what mapped it, and the outcome."""
    made, modules = PACKAGES[name]
    for situation in made(*map(importlib.import_module, modules)):
        yield situation.kind, "Pool", verdict(situation, pool.map)
        yield situation.kind, "Executor", verdict(situation, executor.map)


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--packages",
        nargs="+",
        choices=PACKAGES,
        default=list(PACKAGES),
        metavar="PACKAGE",
        help=", ".join(PACKAGES),
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    warnings.simplefilter("ignore")  # these come from the packages
    torch.set_num_threads(1)  # as in workers; otherwise the last bits of sums differ
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    print_surroundings(surroundings(PROCESSES))
    verdicts = []
    with mpgrad.Pool(PROCESSES) as pool, mpgrad.Executor(1) as executor:
        for name in options.packages:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                print(f"{name:20}not installed", flush=True)
                continue
            for kind, mapper, told in rows_of(name, pool, executor):
                verdicts.append(told)
                print(f"{name:20}{version:10}{kind:10}{mapper:10}{told}", flush=True)
    return int(any(each.startswith("different") for each in verdicts))


if __name__ == "__main__":
    sys.exit(main())
