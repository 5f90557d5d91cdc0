"""Versions of torch, verdicts of compare and proofs of verify."""

from ._places import place
from ._tables import all_tables, benchmark_rows, benchmark_table, measured, whole_table


@place
def compatibility() -> str:
    """Which versions take one step of every system."""
    return all_tables("compatibility")


@place
def suites() -> str:
    """Under which versions every test runs."""
    return all_tables("suites")


@place
def verdicts() -> str:
    """How often compare says what, by gap, noise and seeds."""
    columns = ("gap", "noise", *(f"{seeds} seeds" for seeds in (3, 5, 10, 20, 40)))
    keep = lambda row: row["losses"] == "normal" and row["noise"] >= 0.005  # noqa: E731
    return benchmark_table("verdicts", "Verdicts", columns, keep)


@place
def verdicts_of_five() -> str:
    """How often chance calls one of several recipes worse or better."""
    return whole_table("verdicts", "Comparisons of several")


@place
def verdicts_of_bf16() -> str:
    """How often bfloat16 by nearest is called worse on text."""
    return whole_table("verdicts", "bf16 on text")


@place
def verdicts_note() -> str:
    """How often compare is wrong where a recipe strays and the twin does not."""
    rows = [row for row in benchmark_rows("verdicts", "") if row["gap"] == 0]
    if not rows:
        return ""
    alarms = {
        alone: max(
            int(row[column].split(" ")[0])
            for row in rows
            if (row["losses"] == "recipe alone strays") == alone
            for column in row
            if column.endswith(" seeds")
        )
        for alone in (False, True)
    }
    return (
        f"Losses with long tails give much the same: false alarms come to {alarms[False]} in 100. Where a "
        f"recipe's losses stray from seed to seed and the twin's hardly do, there are up to {alarms[True]}: then "
        "there is only the 95% interval of the mean alone, which is wrong in 5 of 100."
    )


@place
def verify_plants() -> str:
    """What verify says of right models and of planted faults."""
    columns = ("what", "recipe", "passed", "found", "refused", "of")
    return benchmark_table("verify", "Models and plants", columns)


@place
def verify_plants_note() -> str:
    """How many models that were."""
    result = measured("verify")
    return result.tables[0].note if result else ""
