"""Field: how often clusters fail, as published; the figures differ by a factor of 20, so ask for the rate first."""

from __future__ import annotations

from msgspec import Struct

from torchrelay.economics.formulas.rates import rate_per_1000_node_days
from torchrelay.economics.published.claims import Known

VENDOR = "Clockwork, papers on TorchPass"
META = "Kokolis et al., reliability of Meta's research clusters"
LLAMA = "The Llama 3 Herd of Models"
STEPFUN = "StepFun, InfiniteHBD trace (584 faults, 400 nodes, 348 days)"

VENDOR_GPUS, VENDOR_MTTF_H = 1024, 7.9
META_GPUS, META_MTTF_H = 16_384, 1.8
META_RATE = 6.5  # as given; its 1.8 h at 16,384 GPUs is 6.51
LLAMA_GPUS, LLAMA_STOPS, LLAMA_DAYS = 16_384, 419, 54
LLAMA_RATE = 3.79


class Rate(Struct, frozen=True, kw_only=True):
    """A published rate of failures per 1,000 node-days (8 GPUs a node), and what it was worked out from."""

    name: str
    per_1000_node_days: float
    source: str
    how: str
    known: Known = Known.PUBLISHED


RATES = (
    Rate(
        name="headline", source=VENDOR, how="7.9 h between failures on 1,024 GPUs, the case of the headline",
        per_1000_node_days=rate_per_1000_node_days(VENDOR_GPUS, VENDOR_MTTF_H),
    ),
    Rate(name="ant", per_1000_node_days=21.0, source="Ant Group", how="8 % of GPUs a month"),
    Rate(name="opt-175b", per_1000_node_days=15.6, source="OPT-175B log book (Meta)", how="2 machines a day of 128"),
    Rate(name="semianalysis-15k", per_1000_node_days=12.8, source="SemiAnalysis", known=Known.SECOND_HAND,
         how="15,000 GPU-hours between failures"),
    Rate(name="semianalysis-25k", per_1000_node_days=7.7, source="SemiAnalysis", known=Known.SECOND_HAND,
         how="25,000 GPU-hours between failures"),
    Rate(name="meta", per_1000_node_days=META_RATE, source=META, known=Known.UNVERIFIED,
         how="RSC-1; 1.8 h between failures on 16,384 GPUs"),
    Rate(name="ft-hsdp", per_1000_node_days=6.4, source="FT-HSDP (Meta)",
         how="a failure every 18 min, taking it for 100,000 GPUs"),
    Rate(name="llama3", per_1000_node_days=LLAMA_RATE, source=LLAMA,
         how="419 unexpected stops in 54 days on 16,384 GPUs"),
    Rate(name="stepfun", per_1000_node_days=3.35, source=STEPFUN,
         how="unplanned faults of the trace, all nodes present"),
    Rate(name="rsc-2", per_1000_node_days=2.34, source=META, known=Known.UNVERIFIED, how="RSC-2"),
    Rate(name="nebius", per_1000_node_days=1.13, source="Nebius", how="56.6 h between failures on 3,000 GPUs"),
)  # fmt: skip


def published_rate(name: str) -> Rate | None:
    """One by its name, if there is such."""
    return next((rate for rate in RATES if rate.name == name), None)
