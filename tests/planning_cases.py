"""Hypothesis strategies for shapes, contracts and plans, shared by the planning and contract tests."""

from hypothesis import strategies as st

from megagen.arch import ARCHS
from megagen.contract import Contract
from megagen.planning import make_plan
from megagen.planning.planner import FORMAT_OF_ARCH
from megagen.shape import MoEShape

MAX_LOCAL_EXPERTS = 128


@st.composite
def contracts(draw, format=None, max_tokens=16_384):
    """Contracts of any size that a deployment could have, odd ones included."""
    ranks = draw(st.integers(1, 72))
    experts = ranks * draw(st.integers(1, MAX_LOCAL_EXPERTS))
    shape = MoEShape(
        hidden=128 * draw(st.integers(1, 128)),
        intermediate=128 * draw(st.integers(1, 128)),
        experts=experts,
        top_k=draw(st.integers(1, min(32, experts))),
    )
    return Contract(
        shape,
        ranks,
        max_tokens=draw(st.integers(1, max_tokens)),
        format=format or draw(st.sampled_from(sorted(set(FORMAT_OF_ARCH.values())))),
        activation=draw(st.sampled_from(["fast", "exact"])),
        clamp=draw(st.sampled_from([None, 7.0])),
    )


@st.composite
def plans(draw, max_tokens=16_384, arch=None):
    """Plans of any architecture, token count and SM count; tile rows are chosen or forced."""
    arch = arch or draw(st.sampled_from(sorted(ARCHS)))
    contract = draw(contracts(FORMAT_OF_ARCH[arch], max_tokens))
    tokens = draw(st.integers(0, contract.max_tokens))
    sms = draw(st.one_of(st.none(), st.integers(2, 148)))
    plan = make_plan(contract, arch, tokens, sms=sms)
    block_m = draw(st.sampled_from([None, *plan.ladder]))
    return plan if block_m is None else make_plan(contract, arch, tokens, sms=sms, block_m=block_m)
