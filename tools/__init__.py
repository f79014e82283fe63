"""Small programs around training, each with --help: python -m lmzoo.tools.NAME"""
