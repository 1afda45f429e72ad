"""Of networks: every recipe, every method of quantisation, what is estimated of layers, and what a predictor makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp4deploy import peaks
from fp4deploy.data.loader import EpochSampler
from fp4deploy.experiments.search import costs
from fp4deploy.experiments.sensitivity import study
from fp4deploy.graph.costs import work_of_layers
from fp4deploy.packed import describe, memory
from fp4deploy.packed.shapes import shapes_of
from fp4deploy.predict.predictor import Predictor
from fp4deploy.ptq import quantize
from fp4deploy.ptq.methods import METHODS
from fp4deploy.ptq.quantize import hessians_of
from fp4deploy.qat import calibrate, layer_plan, prepare, quantized_layers, restore
from fp4deploy.qat.equalize import equalize
from fp4deploy.qat.load import deployed
from fp4deploy.qat.oscillation import OscillationResets
from fp4deploy.qat.plan import NORMS
from fp4deploy.qat.ranges import automatic_rest
from fp4deploy.qat.recipes import RECIPES
from fp4deploy.qat.sensitive import sensitive_layers
from fp4deploy.rest import RESTS
from fp4deploy.train.losses.auxiliary import damping_loss
from fp4deploy.train.losses.features import Features
from fp4deploy.train.norms import NormStatistics
from fp4deploy.train.optimizer import WeightAverage, make_optimizer, set_learning_rate
from tests.contract.results.arguments import gathered, picture, real
from tests.contract.results.of_scores import OBJECT_HEADS
from tests.contract.results.plain import Answer, each, plain
from tests.packed.small_networks import packed
from tests.predict.pointwise import Pointwise, card


class Twice(nn.Module):
    """Every kind of layer; one is called twice, one never, and one reads what another module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, (3, 1), stride=2, padding=(1, 0), groups=2, bias=False)
        self.scale, self.up = nn.GroupNorm(4, 32), nn.ConvTranspose2d(32, 16, 2, 2)
        self.mix, self.idle, self.head = nn.Linear(16, 16), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.body(torch.relu(self.body(x))))
        x = self.up(torch.relu(self.scale(self.down(x))))
        return self.head(x + self.mix(x.movedim(1, -1)).movedim(-1, 1))


def network() -> nn.Module:
    model = Twice()
    for number, parameter in enumerate((*model.parameters(), *model.buffers())):
        if parameter.is_floating_point():
            parameter.data = real(*parameter.shape, seed=number, scale=0.2 / max(1, parameter.ndim - 1) + 0.05).abs() \
                if parameter.ndim == 1 else real(*parameter.shape, seed=number, scale=0.15)  # fmt: skip
    return model


LAYERS = ("stem", "body", "down", "up", "mix", "idle")
BATCHES = [real(2, 3, 8, 12, seed=seed, scale=1 + seed) for seed in (0, 1)]


def calibrated() -> nn.Module:
    model = prepare(network(), example_inputs=BATCHES[0]).eval()
    calibrate(model, BATCHES)
    return model


def trained(recipe: str) -> Any:
    """Calibration, two forwards and backwards in training mode, and what is evaluated."""
    torch.manual_seed(0)
    model = prepare(network(), recipe, example_inputs=BATCHES[0])
    calibrate(model, BATCHES)
    amaxes = {name: layer.input_amax for name, layer in quantized_layers(model).items() if layer.input_amax is not None}
    before = {name: float(value) for name, value in amaxes.items()}
    for batch in BATCHES[::-1]:
        model.train()(3 * batch).square().mean().backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    plans = [(plan.name, plan.precision, plan.reason) for plan in layer_plan(model)]
    with torch.no_grad():
        return before, {n: float(v) for n, v in amaxes.items()}, gradients, model.eval()(BATCHES[0]), plans


def by_method(method: str) -> Any:
    torch.manual_seed(0)
    model = network().eval()
    found = quantize(model, BATCHES, method, iterations=20)
    with torch.no_grad():
        return model(BATCHES[0]), {n: p for n, p in model.named_parameters() if p.ndim > 1}, vars(found).keys()


def optimized() -> Any:
    """Three steps with learned amaxes, a moving average, resets of oscillating weights, dampening."""
    torch.manual_seed(0)
    model = prepare(network(), "nvfp4_qat+learned", example_inputs=BATCHES[0])
    calibrate(model, BATCHES)
    optimizer, average = make_optimizer(model, 0.1, 0.05, 2.0, 0.3), WeightAverage(model, 0.9)
    layers = quantized_layers(model)
    resets = OscillationResets(layers, 2)
    for step in range(4):
        set_learning_rate(optimizer, 0.01 * (step + 1))
        optimizer.zero_grad()
        (0.3 * damping_loss([*layers.values()])).backward()
        for number, parameter in enumerate(model.parameters()):
            damping = 0 if parameter.grad is None else parameter.grad
            parameter.grad = real(*parameter.shape, seed=10 * step + number) + damping
        optimizer.step()
        resets.update(step)
        average.update(step)
    with average.applied():
        averaged = [value.clone() for value in model.parameters()]
    return averaged, list(model.parameters()), resets.state(), damping_loss([*layers.values()])


def taught() -> Any:
    student, teacher = prepare(network(), example_inputs=BATCHES[0]), network().eval()
    calibrate(student, BATCHES)
    compared = Features(student.train(), teacher)
    losses = []
    for batch in BATCHES:
        student(batch)
        with torch.no_grad():
            teacher(batch)
        losses.append(compared.loss())
    return losses


def measured_norms() -> Any:
    model = network()
    statistics = NormStatistics(model)
    statistics.measure(model, BATCHES)
    with statistics.applied(), torch.no_grad():
        return model.eval()(BATCHES[0])


def studied() -> Any:
    model = network().eval()
    layers: dict[str, nn.Module] = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (*study.PRODUCTS, *NORMS)) and name != "idle"
    }
    seen = study._inputs(model, layers, BATCHES)
    kept = dict.fromkeys(layers, "")
    tails = [row for name, layer in layers.items() for row in study._tails(name, layer, kept[name], seen[name])]
    few = {name: layers[name] for name in ("body", "scale")}
    return seen, tails, study._damage(model, few, kept, BATCHES, dict.fromkeys(layers, 100) | {"body": 300})


def layer_cost(gpu: peaks.Gpu, conv: str) -> Any:
    model = network()
    names = {name: model.get_submodule(name) for name in LAYERS}
    return {name: each.flat for name, each in costs.layer_costs(model, names, BATCHES[0], gpu, conv).items()}


def predicted(**options: Any) -> Any:
    predictor = Predictor(Pointwise(card()), **options)
    found = predictor.predict_batch([picture(32, 48), picture(70, 61, seed=1)])
    return [(p.mask, p.classes(), p.objects(), repr(p), p.overlay(picture(*p.mask.shape))) for p in found]


class Objects(Pointwise):
    """Answers with the same random objects."""

    def infer(self, images: Any) -> Any:
        return real(len(images), self.card.channels, 32, 48, scale=2).numpy()


def found_objects(head: Any) -> Any:
    predictor = Predictor(Objects(card(head=head)), min_score=0.3)
    prediction = predictor.predict(picture(70, 61))
    return prediction.classes(), prediction.objects(), prediction.overlay(picture(70, 61))


def of_packed(recipe: str | None) -> Any:
    _, file = packed(recipe)
    graph = file.graph
    shapes = memory.input_shapes(graph, (32, 48), 3)
    shapes = shapes_of(graph, shapes)
    return (
        memory.activation_bytes(graph, 32, 48, batch=3), memory.plain_bytes(graph), shapes, memory.last_reads(graph),
        memory.activation_bytes(memory.full_precision(graph), 32, 32), [describe._row(file, node, shapes) for node in graph.nodes],
    )  # fmt: skip


RESULTS: dict[str, Answer] = {
    **{f"recipe {name}": each(trained, (name,)) for name in RECIPES},
    **{f"method {name}": each(by_method, (name,)) for name in METHODS},
    "optimised": lambda: plain(optimized()),
    "taught": lambda: plain(taught()),
    "measured norms": measured_norms,
    "studied": lambda: plain(studied()),
    "equalised": lambda: equalize(network().eval(), BATCHES, ["body", "up", "mix"], 0.3),
    "hessians": lambda: hessians_of(calibrated(), BATCHES, 3),
    "ranges": lambda: [automatic_rest(network(), [scale * BATCHES[0]]).name for scale in (1, 1e3, 1e6)],
    "sensitive": each(lambda share: sensitive_layers(calibrated(), BATCHES, share), (0.1, 0.5, 1.0)),
    "deployed": lambda: [list(deployed(calibrated(), rest).state_dict().values()) for rest in RESTS.values()],
    "restored": lambda: sorted(restore(calibrated()).state_dict()),
    "work": lambda: work_of_layers(model := network(), {n: model.get_submodule(n) for n in LAYERS}, BATCHES[0]),
    "layer costs": each(layer_cost, peaks.GPUS, ("qdq", "gemm")),
    "order": lambda: [list(EpochSampler(7, seed)) for seed in (0, 1)],
    "predicted": each(predicted, tile=(False, True), overlap=(None, 3), min_score=(0.0, 0.9), batch=(1, 4)),
    "predicted objects": gathered(OBJECT_HEADS[:1] + OBJECT_HEADS[2:3], found_objects),
    "packed": each(of_packed, (None, "nvfp4_qat", "nvfp4_4o6_qat")),
}
