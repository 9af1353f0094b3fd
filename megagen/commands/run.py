"""``megagen run``: one layer on the GPUs that are here, checked against the reference."""

from typing import Annotated, Any

import typer

from megagen.commands.options import LayerOptions, takes_layer
from megagen.commands.output import Json, emit
from megagen.errors import DeviceError, InputError
from megagen.inspection.tables import rows_table
from megagen.routing import ROUTING_KINDS, parse_tokens

DEFAULT_TOKENS = "64"


@takes_layer
def run(
    layer: LayerOptions,
    routing: Annotated[str, typer.Option(help=f"One of {', '.join(ROUTING_KINDS)}.")] = "uniform",
    seed: Annotated[int, typer.Option(help="Of weights, tokens and routing.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a wait in the kernel may take.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Run a layer with random weights and tokens; exit 1 if its results are wrong.

    One process per GPU; with more --ranks than GPUs, all ranks share one GPU, each on its part of the SMs.
    """
    import torch

    from megagen.bench.processes import run_ranks
    from megagen.bench.verify import RunJob, verify

    contract = layer.contract()
    counts = tuple(parse_tokens(layer.tokens or DEFAULT_TOKENS, contract.ranks))
    largest = max(max(case) for case in counts)
    if largest > contract.max_tokens:
        raise InputError(f"tokens={largest} is above --max-tokens={contract.max_tokens}; raise that")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        raise DeviceError("no GPU: this needs an NVIDIA GPU and a CUDA build of torch; see `megagen doctor`")
    local = contract.ranks > gpus
    job = RunJob(
        contract,
        counts,
        routing,
        plan=None if layer.plan is None else layer.forced_plan(),
        local=local,
        num_sms=layer.sms,
        timeout=timeout,
        seed=seed,
    )
    messages = run_ranks(verify, job, 1 if local else contract.ranks)
    rows = [message["row"] for message in messages]
    record = {
        "contract_hash": contract.hash,
        "ranks": contract.ranks,
        "local": local,
        "routing": routing,
        "rows": rows,
    }
    where = "on one GPU" if local or contract.ranks == 1 else "one GPU each"
    ranks = "1 rank" if contract.ranks == 1 else f"{contract.ranks} ranks"
    title = f"{contract.shape}, {ranks} {where}, routing {routing}"
    emit(as_json, record, rows_table(title, [_shown(row) for row in rows]))
    if not all(row["right"] for row in rows):
        raise typer.Exit(1)


def _shown(row: dict[str, Any]) -> dict[str, str]:
    """A row as text; errors are relative, the time is of a bfloat16 call."""
    counts = row["tokens"]
    return {
        "tokens per rank": str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts)),
        "plan": " ".join(row["plans"]),
        "time, us": f"{row['us']:,.1f}",
        "error": f"{row['whole']:.1e}",
        "worst row": f"{row['worst_row']:.1e}",
        "against float32": f"{row['float32']:.1e}",
        "same bits": "yes" if row["same_bits"] else "NO",
        "right": "yes" if row["right"] else "NO",
    }
