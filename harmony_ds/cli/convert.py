"""`harmony-ds convert`: write a checkpoint of DeepSpeed or harmony_ds anew, in another layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harmony_ds.checkpoint import Layout, convert
from harmony_ds.cli.options import add_json
from harmony_ds.cli.progress import tell

ABOUT = "Write the checkpoint SRC into DST in another layout. Pickles of DeepSpeed are read without executing them."


def register(parser: argparse.ArgumentParser) -> None:
    add, layouts = parser.add_argument, [layout.value for layout in Layout]
    add("source", type=Path, metavar="SRC", help="A checkpoint, or a folder of several (then the latest, or --tag).")
    add("target", type=Path, metavar="DST", help="The folder to write into; made if it is not there.")
    add("--to", choices=layouts, required=True, metavar="LAYOUT", help=f"One of {', '.join(layouts)}.")
    add("--tag", help="Which checkpoint in SRC.")
    add_json(parser)


def command(args: argparse.Namespace) -> int:
    tell(f"converting {args.source} ...")
    written = convert(args.source, args.target, Layout(args.to), args.tag)
    if args.json:
        print(json.dumps({"written": str(written), "layout": args.to}))
    else:
        print(f"{written} is a checkpoint of the layout {args.to}.")
    return 0
