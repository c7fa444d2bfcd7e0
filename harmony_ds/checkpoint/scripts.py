"""The scripts that DeepSpeed puts beside its checkpoints, which make plain weights of them."""

from __future__ import annotations

import stat
from importlib.util import find_spec
from pathlib import Path

from harmony_ds.checkpoint.folders import replacing
from harmony_ds.checkpoint.tensor_files import write_bytes
from harmony_ds.errors import CheckpointError

_GUARD = 'if __name__ == "__main__":'
_HOOK = """from harmony_ds.checkpoint.deepspeed.zero_to_fp32 import teach

teach(globals())  # to read checkpoints of harmony_ds, too


"""


def put_scripts(save_dir: Path, ours: bool) -> None:
    """Writes `zero_to_fp32.py` and `zero_to_torch.py` into `save_dir`, unless they are there already.

    Args:
        ours: they are to read checkpoints of ours, too.

    Raises:
        CheckpointError: the installed DeepSpeed has another script than the one that is completed here.
    """
    spec = find_spec("deepspeed")  # to import it takes seconds
    assert spec is not None and spec.submodule_search_locations is not None
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):  # the latter imports the former
        source = Path(spec.submodule_search_locations[0]) / "utils" / name
        text = source.read_text(encoding="utf-8") if source.is_file() else ""
        if ours and name == "zero_to_fp32.py":
            before, guard, after = text.partition(_GUARD)
            if not guard:
                raise CheckpointError(f"{source} has no line {_GUARD!r}: this version of DeepSpeed is not known here.")
            text = before + _HOOK + guard + after
        path = save_dir / name
        if text and not (path.is_file() and path.read_bytes() == text.encode()):
            with replacing(path) as fresh:
                write_bytes(fresh, text.encode())
                fresh.chmod(fresh.stat().st_mode | stat.S_IEXEC)
