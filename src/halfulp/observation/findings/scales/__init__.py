"""Loss scales and gradient exponents: collapsed, held down, out of step with a schedule."""

from ._scale_collapsed import ScaleCollapsed as ScaleCollapsed
from ._scheduler_on_skips import SchedulerOnSkips as SchedulerOnSkips
from ._site_holds_scale import SiteHoldsScale as SiteHoldsScale
