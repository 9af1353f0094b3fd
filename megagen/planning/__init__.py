"""Shape, architecture and token count -> KernelPlan. Pure functions; needs neither torch nor a GPU."""

from megagen.planning.plan import Choice, KernelPlan, Role
from megagen.planning.planner import PlanSet, make_plan, plan_set

__all__ = ["Choice", "KernelPlan", "PlanSet", "Role", "make_plan", "plan_set"]
