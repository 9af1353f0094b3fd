"""``megagen plan``: the plan of a layer, and why."""

import json

from megagen.commands.options import LayerOptions, takes_layer
from megagen.commands.output import Json, emit
from megagen.inspection.plan_tables import plan_tables
from megagen.inspection.tables import rows_table
from megagen.planning.cost import predict


@takes_layer
def plan(
    layer: LayerOptions,
    as_json: Json = False,
) -> None:
    """Print the plans of a layer (of every token bucket, or of --tokens) and the reason of each decision."""
    plans = layer.plans()
    record = {
        "contract_hash": plans.plans[0].contract.hash,
        "max_tokens": list(plans.limits),
        "plans": [json.loads(one.to_json()) for one in plans.plans],
        "predictions": [predict(one, sms=layer.sms).to_dict() for one in plans.plans],
    }
    buckets = rows_table(
        "which plan serves which number of tokens per rank",
        [
            {
                "up to": limit,
                "plan": one.name,
                "predicted us": f"{predict(one, limit, sms=layer.sms).seconds * 1e6:,.0f}",
            }
            for limit, one in zip(plans.limits, plans.plans)
        ],
    )
    emit(as_json, record, *(table for one in plans.plans for table in plan_tables(one, layer.sms)), buckets)
