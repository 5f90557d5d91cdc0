"""halfulp tasks: the jobs that recipes are compared on."""

from .._output import Json, make_console, make_plain_table, print_json


def tasks(json: Json = False) -> None:
    """Print the tasks that recipes can be compared on."""
    from ...trials.tasks import kind_of, names
    from ...trials.tasks._registry import needs_data

    rows = [
        {
            **{field: getattr(kind, field) for field in ("name", "title", "steps", "judged_by")},
            "needs_data": needs_data(kind),
        }
        for kind in map(kind_of, names())
    ]
    if json:
        print_json(rows)
        return
    table = make_plain_table(["task", "what it is", "steps", "judged by", "data"], right=["steps"], fold=["what it is"])
    for row in rows:
        data = "--data DIR" if row["needs_data"] else "embedded"
        table.add_row(row["name"], row["title"], f"{row['steps']:,}", row["judged_by"].replace("_", " "), data)
    make_console().print(table)
