"""`python -m hjax.launch.algorithm_docs`: write anew what docs/algorithms takes from the source."""

from pathlib import Path

import hjax
from hjax.studies.algorithm_docs import written

if __name__ == "__main__":
    folder = Path(hjax.__file__).parents[1] / "docs" / "algorithms"
    for path in sorted(folder.glob("*.md")):
        path.write_text(written(path.read_text(), folder))
