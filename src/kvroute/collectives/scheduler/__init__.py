"""The central scheduler of all-reduce schemes: reports of agents go in, tables of schemes come out."""
