"""Makes the tiny model that draws: its data, its training, its export and its checks. Development only: see README.md."""
