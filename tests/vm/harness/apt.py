"""Downloads packages with the machine's apt, without installing them: a private state, no root.

Sources, proxy and keys are those in /etc/apt. Only entries of the distribution itself are used, so an
unavailable third-party repository does not matter.
"""

import glob
import os
import re
import shutil
import subprocess

from . import Unavailable

OS_RELEASE = "/etc/os-release"
# The release whose backports have the newest kernel and QEMU, by distribution.
NEXT_RELEASES = {"debian": "trixie"}


def os_release():
    """-> (id, codename) of this machine's distribution."""
    try:
        with open(OS_RELEASE, encoding="utf-8") as file:
            fields = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
    except OSError:
        return "", ""
    return fields.get("ID", "").strip('"'), fields.get("VERSION_CODENAME", "").strip('"')


def _stanzas(text):
    """The entries of a .sources file, as dictionaries; continuation lines stay in the value."""
    for block in re.split(r"\n\s*\n", text):
        entry = {}
        for line in block.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            if line[0] in " \t" and entry:
                entry[next(reversed(entry))] += "\n" + line
            elif ":" in line:
                key, value = line.split(":", 1)
                entry[key.strip()] = value.strip()
        if entry:
            yield entry


def _one_line(text):
    """The entries of a sources.list, as the same dictionaries."""
    options_of = {"signed-by": "Signed-By", "trusted": "Trusted"}
    for line in text.splitlines():
        found = re.match(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+(.*)", line.split("#", 1)[0].strip())
        if found:
            entry = {"Types": "deb", "URIs": found[2], "Suites": found[3], "Components": found[4].strip()}
            for option in (found[1] or "").split():
                key, _, value = option.partition("=")
                if key.lower() in options_of:
                    entry[options_of[key.lower()]] = value
            yield entry


def select(entries, own, wanted):
    """The entries for the release `own` (with -updates, -security), changed to the release `wanted`."""
    chosen = []
    for entry in entries:
        suites = [s for s in entry.get("Suites", "").split() if s == own or s.startswith(own + "-")]
        if "deb" in entry.get("Types", "").split() and suites and entry.get("Enabled", "yes") != "no":
            suites = [wanted + s[len(own) :] for s in suites if not s.endswith("-backports")]
            kept = {k: entry[k] for k in ("URIs", "Components", "Signed-By", "Trusted") if k in entry}
            if suites:
                chosen.append({"Types": "deb", **kept, "Suites": " ".join(suites)})
    return chosen


class Archive:
    """The packages of one release, with its state under `directory`."""

    def __init__(self, directory, release=None):
        self.directory = directory
        self.distribution, own = os_release()
        self.release = release or own
        for tool in ("apt-get", "dpkg-deb"):
            if not shutil.which(tool):
                raise Unavailable(f"{tool} is not installed: guests are built from Debian or Ubuntu packages")
        entries = []
        for path in sorted(glob.glob("/etc/apt/sources.list.d/*") + glob.glob("/etc/apt/sources.list")):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            entries += _stanzas(text) if path.endswith(".sources") else _one_line(text) if ".list" in path else []
        self.sources = select(entries, own, self.release)
        if not self.sources:
            raise Unavailable(f"/etc/apt names no package source of {own or 'this distribution'}")
        self.prepare()

    @classmethod
    def backports(cls, directory):
        """The backports to the next release, which have the newest kernel, and nothing else."""
        archive = cls(directory)
        release = NEXT_RELEASES.get(archive.distribution)
        if release is None:
            raise Unavailable(f"no backports to a newer release of {archive.distribution} are known")
        archive = cls(directory, release)
        main = next((entry for entry in archive.sources if "-security" not in entry["Suites"]), archive.sources[0])
        archive.sources = [{**main, "Suites": f"{release}-backports"}]
        archive.prepare()
        return archive

    def prepare(self):
        """Writes apt's configuration and state; call it again after a change of `sources`."""
        for folder in ("lists/partial", "archives/partial", "sources"):
            os.makedirs(f"{self.directory}/{folder}", exist_ok=True)
        with open(f"{self.directory}/status", "w", encoding="utf-8"):
            pass  # an empty status: closures include all dependencies
        with open(f"{self.directory}/sources/own.sources", "w", encoding="utf-8") as file:
            for entry in self.sources:
                file.writelines(f"{key}: {value}\n" for key, value in entry.items())
                file.write("\n")
        settings = {
            "Dir::State": self.directory,
            "Dir::State::lists": f"{self.directory}/lists",
            "Dir::State::status": f"{self.directory}/status",
            "Dir::Cache": self.directory,
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": f"{self.directory}/sources",
            "Dir::Etc::preferencesparts": "/dev/null",
            "APT::Architecture": "amd64",
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Debug::NoLocking": "true",
        }
        with open(f"{self.directory}/apt.conf", "w", encoding="utf-8") as file:
            file.writelines(f'{key} "{value}";\n' for key, value in settings.items())
            file.write('#clear APT::Architectures;\nAPT::Architectures { "amd64"; };\n')
            file.write("#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n")

    def _apt(self, *arguments, cwd=None):
        environment = {**os.environ, "APT_CONFIG": f"{self.directory}/apt.conf", "LC_ALL": "C"}
        run = subprocess.run(
            arguments, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if run.returncode != 0:
            last = (run.stderr.strip() or run.stdout.strip() or "no message").splitlines()[-1]
            raise Unavailable(f"{arguments[0]} {arguments[1]}: {last}")
        return run.stdout

    def update(self):
        self._apt("apt-get", "-qq", "update")

    def closure(self, names, suite=None):
        """`names` and their dependencies, without recommendations; from `suite` if given."""
        chosen = ["-t", suite] if suite else []
        out = self._apt("apt-get", "-qq", "--print-uris", "--no-install-recommends", *chosen, "install", *names)
        return sorted({found[1] for found in re.finditer(r"^'[^']*' ([^_ ]+)_", out, re.M)} | set(names))

    def depends(self, name):
        """The direct dependencies of a package, first alternatives only."""
        out = self._apt("apt-cache", "depends", name)
        return [found[1] for found in re.finditer(r"^ {1,2}\|?(?:Pre)?Depends: ([^<\s]\S*)", out, re.M)]

    def unpack(self, names, into, suite=None):
        """Downloads the packages and unpacks them into the folder `into`, which must not exist yet."""
        work = into + ".new"
        shutil.rmtree(work, ignore_errors=True)
        os.makedirs(work + "/debs")
        chosen = ["-t", suite] if suite else []
        self._apt("apt-get", "-qq", *chosen, "download", *names, cwd=work + "/debs")
        for package in sorted(glob.glob(work + "/debs/*.deb")):
            if subprocess.run(["dpkg-deb", "-x", package, work + "/tree"], check=False).returncode != 0:
                raise Unavailable(f"{os.path.basename(package)} cannot be unpacked (is the disk full?)")
        os.rename(work + "/tree", into)
        shutil.rmtree(work)
