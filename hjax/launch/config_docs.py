"""`python -m hjax.launch.config_docs`: print the text of docs/config.md."""

from hjax.studies.config_docs import config_markdown

if __name__ == "__main__":
    print(config_markdown(), end="")
