"""`harmony-ds machines`: the names that `estimate --machine` knows, and where their numbers come from."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

from harmony_ds.cli import options
from harmony_ds.profiler.hardware import known_hardware


def command(as_json: options.Json = False) -> None:
    """Lists GPUs, links and hosts. A machine is GPU, GPU/LINK, GPU/HOST or GPU/LINK/HOST."""
    known = known_hardware()
    if as_json:
        typer.echo(json.dumps(asdict(known), indent=1))
        return
    console = Console(highlight=False)
    gpus = Table("GPU", "GiB", "fp32", "bf16 TFLOP/s", "GB/s", "link", "host", "source", box=None)
    for gpu in known.gpus.values():
        numbers = (gpu.memory_gib, gpu.fp32_tflops, gpu.half_tflops, gpu.memory_gb_per_s)
        gpus.add_row(gpu.name, *(f"{number:g}" for number in numbers), gpu.link, gpu.host, gpu.source)
    links = Table("link", "GB/s", "achieved", "both ways", "source", box=None)
    for link in known.links.values():
        rates = (link.nominal_gb_per_s, link.one_way_gb_per_s, link.both_ways_gb_per_s)
        links.add_row(link.name, *(f"{rate:g}" for rate in rates), link.source)
    hosts = Table("host", "GiB", "GB/s", "cores", "source", box=None)
    for host in known.hosts.values():
        hosts.add_row(host.name, f"{host.memory_gib:g}", f"{host.nominal_gb_per_s:g}", str(host.cores), host.source)
    for table in (gpus, links, hosts):
        console.print(table)
        console.print()
