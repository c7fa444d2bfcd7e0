"""DeepSpeed's flops profiler, over one forward pass that leaves nothing behind.

While it counts, it has hooks on all modules, and functions of its own in the place of torch's. In a step it would count
wrongly: micro-batches take turns at layers, which run twice. Here one of them passes the model alone, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from harmony_ds.decomposer.find import Layer
from harmony_ds.profiling.passes import ModelPasses
from harmony_ds.profiling.sample import Sample

_COUNTED = (
    "__flops__",
    "__macs__",
    "__params__",
    "__expert_params__",
    "__model_expert_params__",
    "__start_time__",
    "__duration__",
)
"""The attributes in which DeepSpeed's profiler counts."""
_DURATION = "__duration__"


class FlopCounts:
    """What DeepSpeed's profiler has counted of each module in one forward pass."""

    def __init__(self, profiler: Any, counts: Mapping[nn.Module, dict[str, Any]]) -> None:
        """Keep the counts of a `FlopsProfiler` by module: attributes of modules, while it prints."""
        self._profiler = profiler
        self._counts = counts

    def set_layer_times(self, layers: Sequence[Layer], forward_ms: Sequence[float]) -> None:
        """Set what each of `layers` takes; modules that contain some take what these take together.

        The pass has measured the modules within layers, and, of layers and what contains them, swap-ins, too.
        """
        times = {layer.module: ms / 1e3 for layer, ms in zip(layers, forward_ms, strict=True)}
        within = {inner for layer in layers for inner in layer.module.modules()}
        for module, counts in self._counts.items():
            if module in times or module not in within:
                counts[_DURATION] = times.get(module, 0.0)  # 0: that of its children, when it is printed

    def print_table(self, engine: Any, step: int, values: Mapping[str, Any]) -> None:
        """Print DeepSpeed's table to standard output, or into a file.

        Args:
            engine: has the names of a DeepSpeedEngine that the profiler reads.
            step: the number of the optimizer step that is over.
            values: of the ds_config.
        """
        profiler = self._profiler
        profiler.ds_engine = engine
        before = {module: {**vars(module)} for module in self._counts}
        try:
            for module, counts in self._counts.items():
                vars(module).update(counts)
            profiler.print_model_profile(
                profile_step=step,
                module_depth=values["flops_profiler.module_depth"],
                top_modules=values["flops_profiler.top_modules"],
                detailed=values["flops_profiler.detailed"],
                output_file=values["flops_profiler.output_file"],
            )
        finally:
            profiler.ds_engine = None
            for module, attributes in before.items():
                for name in vars(module).keys() - attributes.keys():
                    del vars(module)[name]
                vars(module).update(attributes)


def count_flops(model: nn.Module, passes: ModelPasses, sample: Sample, recompute_forward_factor: float) -> FlopCounts:
    """Run one forward pass of `sample` under DeepSpeed's profiler; return what it counts.

    Args:
        recompute_forward_factor: the forward passes that the table counts to a backward pass besides 2.
    """
    from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler

    profiler = FlopsProfiler(model, None, recompute_forward_factor)
    counts: dict[nn.Module, dict[str, Any]] = {}
    with passes.opened():
        try:
            profiler.start_profile()
            passes.forward(sample)
        finally:
            profiler.stop_profile()
            for module in model.modules():
                own = vars(module)
                counts[module] = {name: own.pop(name) for name in _COUNTED if name in own}
    return FlopCounts(profiler, counts)
