"""An example of a package that plugs into kvtool: one policy, one metric."""
