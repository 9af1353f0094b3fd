"""``megagen tune``: which of the planner's candidates is fastest on this machine."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megagen.commands.bench import count_gpus
from megagen.commands.options import LayerOptions, takes_layer
from megagen.commands.output import Json, emit, warn
from megagen.contract import Contract
from megagen.errors import InputError
from megagen.inspection.tables import rows_table


@takes_layer
def tune(
    layer: LayerOptions,
    samples: Annotated[int, typer.Option(help="Timed calls per candidate.")] = 20,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and routing.")] = 0,
    as_json: Json = False,
) -> None:
    """Time the planner's candidates for --tokens (default: every bucket) and keep the fastest."""
    from megagen.bench.tune import TuneJob, winner

    if layer.plan is not None:
        raise InputError("--plan leaves nothing to choose; leave it out")
    contract = layer.contract()
    count_gpus(contract.ranks)
    tokens = _token_counts(layer, contract)
    setup, measured = _measure(TuneJob(contract, tokens, layer.sms, samples, seed))
    chosen = {count: best for count, results in measured.items() if (best := winner(results)) is not None}
    path = _store(setup, contract, chosen)
    rows = [_shown(count, results, chosen.get(count)) for count, results in measured.items()]
    record = {
        **setup,
        "contract_hash": contract.hash,
        "file": path,
        "tuned": [{"tokens": count, "results": results} for count, results in measured.items()],
    }
    title = f"{contract.shape}, EP-{contract.ranks} on {setup.get('gpu')}; us"
    emit(as_json, record, rows_table(title, rows), f"written: {path}" if path else "nothing was kept")
    if len(chosen) < len(tokens):
        raise typer.Exit(1)


def _token_counts(layer: LayerOptions, contract: Contract) -> tuple[int, ...]:
    from megagen.tuning import token_buckets

    counts = [count for count in layer.token_counts() or token_buckets(contract.max_tokens) if count > 0]
    if not counts or max(counts) > contract.max_tokens:
        raise InputError(
            f"tokens={layer.tokens} is not within 1 and --max-tokens={contract.max_tokens}; raise that"
        )
    return tuple(counts)


def _measure(job: Any) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
    """What the processes report: the GPU and its SMs, and for each token count the results."""
    from megagen.bench.processes import run_ranks
    from megagen.bench.tune import tune as work

    setup: dict[str, Any] = {}
    measured: dict[int, list[dict[str, Any]]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=len(job.tokens))
        for message in run_ranks(work, job, job.contract.ranks):
            if message["kind"] == "setup":
                setup = {key: value for key, value in message.items() if key != "kind"}
                progress.update(task, description=f"{job.tokens[0]} tokens")
                continue
            measured[message["tokens"]] = message["results"]
            if message["problem"]:
                warn(f"{message['tokens']} tokens: {message['problem']}")
            progress.update(task, advance=1, description=f"{message['tokens']} tokens")
    return setup, measured


def _store(setup: dict[str, Any], contract: Contract, chosen: dict[int, dict[str, Any]]) -> str | None:
    """Keep the fastest; the path of the file, None if there is nothing to keep."""
    from megagen.tuning import store

    if not chosen:
        return None
    return str(store(setup["gpu"], contract, setup["arch"], setup["sms"], chosen))


def _shown(tokens: int, results: list[dict[str, Any]], best: dict[str, Any] | None) -> dict[str, str]:
    """A row as text: the rules' choice, the fastest, and how much is between them."""
    if not results or best is None:
        return {"tokens": str(tokens), "rules": "-", "fastest": "failed", "rules / fastest": "-", "all": "-"}
    rules = results[0]
    return {
        "tokens": str(tokens),
        "rules": f"{_label(rules)} {rules['us']:,.1f}",
        "fastest": f"{_label(best)} {best['us']:,.1f}",
        "rules / fastest": f"{rules['us'] / best['us']:.3f}",
        "all": ", ".join(
            f"{_label(one)} {one['us']:,.1f}{'' if one['same_bits'] else ' WRONG'}" for one in results
        ),
    }


def _label(result: dict[str, Any]) -> str:
    """How tables call a candidate."""
    settings = [f"{name}={value}" for name, value in result["choice"].items()]
    return " ".join(settings) or f"rules ({result['plan'].rsplit('-', 2)[-2]})"
