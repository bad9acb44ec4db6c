"""Write tables of five hospitals as they come: gaps, '?' and codes. The fifth has answers only later.

    python examples/make_hospitals.py FOLDER

The patients are made up; the same folder comes out every time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

# patients, mean age, share of men, share of missing cholesterol, how often sick
HOSPITALS = {
    "basel": (260, 58, 0.70, 0.05, 0.50),
    "graz": (320, 52, 0.72, 0.10, 0.35),
    "lyon": (180, 61, 0.90, 0.95, 0.60),  # it hardly ever measures cholesterol
    "oslo": (240, 49, 0.55, 0.00, 0.25),
    "turin": (150, 56, 0.65, 0.20, 0.45),
}


def patients(name: str, number: int) -> pd.DataFrame:
    """One hospital's table."""
    count, age, men, gaps, sick = HOSPITALS[name]
    rng = np.random.default_rng(number)
    risk = rng.normal(size=count)
    y = risk + 0.5 * rng.normal(size=count) > np.quantile(risk, 1 - sick)
    table = pd.DataFrame(
        {
            "patient": [f"{name[0].upper()}{i:04d}" for i in range(count)],
            "age": (age + 6 * risk + 6 * rng.normal(size=count)).round().astype(int),
            "sex": np.where(rng.random(count) < men, "m", "f"),
            "chest pain": rng.choice(["none", "typical", "atypical"], count, p=[0.3, 0.4, 0.3]),
            "blood pressure": (130 + 8 * risk + 12 * rng.normal(size=count)).round().astype(int),
            "cholesterol": (220 + 15 * risk + 40 * rng.normal(size=count)).round().astype(int).astype(str),
            "heart rate": (150 - 14 * risk + 12 * rng.normal(size=count)).round().astype(int),
            "admitted": [f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(count)],
        }
    )
    table.loc[y & (rng.random(count) < 0.6), "chest pain"] = "typical"
    table.loc[rng.random(count) < gaps, "cholesterol"] = "?"
    table.loc[rng.random(count) < 0.04, "chest pain"] = ""
    table["sick"] = np.where(y, "yes", "no")
    return table


def main(folder: Path) -> None:
    (folder / "hospitals").mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(HOSPITALS):
        table = patients(name, number)
        if name == "turin":
            table.drop(columns="sick").to_csv(folder / "turin.csv", index=False)
            table.to_csv(folder / "turin_answered.csv", index=False)
        else:
            table.to_csv(folder / "hospitals" / f"{name}.csv", index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
