"""The configuration of lmzoo, YAML only; a package so that Hydra finds it as `pkg://lmzoo.conf` from any folder."""
