"""Makes the tiny model that draws: data, training, export, checks. Development only: see README.md."""
