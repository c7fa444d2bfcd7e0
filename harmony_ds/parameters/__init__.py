"""What a model's parameters know of their engine: masters, optimizer state, and what changing them by hand entails.

While an engine has a model, its parameters are `EngineParameter`s: plain parameters whose every use passes their
`ParameterLink` first. So what is read is true, whoever kept the parameter from whenever, and what is written, put in
its place or left as its gradient counts as it does in plain PyTorch, or is refused.

Each parameter carries its link under the names that DeepSpeed's helpers look for (`_hp_mapping`,
`get_full_hp_param`, ...), so that `deepspeed.utils.safe_get_full_fp32_param` and its like work as ours do.
"""

from harmony_ds.parameters.link import Owner, link_of, links_of, take_over
from harmony_ds.parameters.links import ParameterLinks

__all__ = ["Owner", "ParameterLinks", "link_of", "links_of", "take_over"]
