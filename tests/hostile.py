"""Making files that mean harm, for tests of everything that opens files."""

import os
import zipfile


class Payload:
    """Unpickling this with anything that calls what a pickle names writes ``path``."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.system, (f"echo ran > '{self.path}'",))


def edit_zip(source, target, edit, compression=zipfile.ZIP_STORED):
    """Copy a zip file, each entry's content as ``edit(name, content)`` gives it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, edit(entry.filename, old.read(entry)))
