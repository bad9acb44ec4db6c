"""Write shops.csv, the sales of forty shops. The reasons for a return differ from shop to shop."""

import sys

import numpy as np
import pandas as pd

random = np.random.default_rng(0)
parts = []
for shop in range(40):
    n = int(random.integers(60, 200))
    price, weight, days = random.gamma(2.0, 20.0, n), random.normal(1.0, 0.3, n), random.integers(1, 30, n)
    taste = random.normal([0.03, 1.0, 0.0], [0.03, 1.5, 0.15])
    score = taste[0] * (price - 40) + taste[1] * (weight - 1) + taste[2] * (days - 15) + random.normal(0, 0.3, n)
    returned = np.where(score > 0, "yes", "no")
    columns = {"shop": f"shop-{shop:02}", "price": price, "weight": weight, "days": days, "returned": returned}
    parts.append(pd.DataFrame(columns))
pd.concat(parts).round(3).to_csv(sys.argv[1] if len(sys.argv) > 1 else "shops.csv", index=False)
