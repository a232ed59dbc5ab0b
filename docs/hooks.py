"""Mends what the generated pages show of Sphinx references and of options without a default."""

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """References as code, a colon for two, and no default where an option has none."""
    html = ROLE.sub(r"<code>\1</code>", html)
    html = html.replace("::</p>", ":</p>")
    return re.sub(r"<td><code>Sentinel\.UNSET</code></td>", "<td></td>", html)
