"""`python -m services.chart`: writes the generated files of the chart anew (`make chart`)."""

from pathlib import Path

from services.chart.dashboard import dashboard_json
from services.chart.generate import schema_json, values_yaml, with_table

CHART = Path("helm/joinmesh")


def generated(chart: Path) -> dict[Path, str]:
    """Every generated file of the chart, with the text it is to have."""
    readme = chart / "README.md"
    return {
        chart / "values.yaml": values_yaml(),
        chart / "values.schema.json": schema_json(),
        chart / "files" / "dashboard.json": dashboard_json(),
        readme: with_table(readme.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for file, text in generated(CHART).items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
