"""`harmony-ds convert`: write a checkpoint of DeepSpeed or harmony_ds anew, in another layout."""

from __future__ import annotations

import argparse
import json

from harmony_ds.checkpoint import Layout, convert
from harmony_ds.cli.progress import tell


def command(args: argparse.Namespace) -> int:
    tell(f"converting {args.source} ...")
    written = convert(args.source, args.target, Layout(args.to), args.tag)
    if args.json:
        print(json.dumps({"written": str(written), "layout": args.to}))
    else:
        print(f"{written} is a checkpoint of the layout {args.to}.")
    return 0
