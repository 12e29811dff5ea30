"""Records what real training engines do, on CPU ranks: the truth that zsim's Programs are held against."""
