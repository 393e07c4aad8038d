"""A real, private Slurm cluster on this machine: munged, slurmctld, and one slurmd per node.

Everything runs in namespaces of one keeper process, a `cat` that ends with its standard input. When
the owner of that pipe ends, even by kill -9, the kernel removes the processes (pid namespace), the
network (net namespace) and the files (a tmpfs at /run, visible only inside). So nothing global
changes, no port can be in use, and nothing has to be cleaned up.

To Slurm each node is a machine with its own address, host name and processes. A test can kill it,
cut it from the network, and bring it back.
"""

import os
import shutil
import subprocess
from pathlib import Path

import psutil

from tests.distributed import wait_for

TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
HEAD = "10.77.0.254"
# SIGNALING: for a moment before its time limit, and whenever it is sent a signal.
LASTING = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING", "SIGNALING")
NEW_MACHINE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

CONFIG = """
ClusterName=alberttest
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credentials have expired; the default is 120 s.
AuthInfo=socket=/run/munge/sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool.%n
TmpFS=/run/tmp.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile=/run/log/slurmctld.log
SlurmdLogFile=/run/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=/run/log/jobcomp.txt
MpiDefault=none
MailProg=/bin/true
# Back without an operator after a crash; with 2, a job would collide with its old self.
ReturnToService=1
# Allows nodes of any declared size.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdTimeout={node_timeout}
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
UnkillableStepTimeout=60
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-{nodes}] Port=6818 CPUs=64 RealMemory=500000 Gres=gpu:8 Feature=fast State=UNKNOWN
PartitionName=batch Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=10
"""

SETUP = """
set -e
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/munge /run/log /run/state /run/dev /run/disk
hostname head
echo "127.0.0.1 localhost" > /run/hosts
echo "{head} head" >> /run/hosts
for i in $(seq {nodes}); do echo "10.77.0.$i n$i" >> /run/hosts; done
mount --bind /run/hosts /etc/hosts
for i in $(seq 0 7); do mknod /run/dev/gpu$i c 1 3; done  # the device files of a node with GPUs
head -c 1024 /dev/urandom > /run/munge/key
chmod 600 /run/munge/key
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
ip addr add {head}/24 dev br0
for i in $(seq {nodes}); do
    ip netns add n$i
    ip link add v$i type veth peer name eth0 netns n$i
    ip link set v$i master br0 up
    ip -n n$i addr add 10.77.0.$i/24 dev eth0
    ip -n n$i link set lo up
    ip -n n$i link set eth0 up
done
"""

MUNGED = (
    *("munged", "--foreground", "--force", "--key-file=/run/munge/key"),
    *("--socket=/run/munge/sock", "--pid-file=/run/munge/pid"),
    *("--log-file=/run/log/munged.log", "--seed-file=/run/munge/seed"),
)


def why_not() -> str | None:
    """Why the cluster cannot run on this machine; None if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        return f"Slurm on a real cluster: {', '.join(missing)} not installed (see .ci/run)"
    if subprocess.run([*NEW_MACHINE, "--net", "true"], capture_output=True).returncode:
        return "Slurm on a real cluster: needs root, for namespaces"
    return None


class Cluster:
    """Nodes n1, n2, ... each of 64 cores and 8 fake GPUs; partitions `batch` and `urgent`."""

    def __init__(self, nodes: int, *, node_timeout: int = 10):
        self.size = nodes
        self._node_timeout = node_timeout
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        self._keeper = subprocess.Popen(
            [*NEW_MACHINE, "--net", "--uts", "--ipc", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._keeper.stdin.close()
        self._keeper.wait()
        for daemon in self._daemons.values():
            daemon.wait()

    def _start(self) -> None:
        wait_for(lambda: psutil.Process(self._keeper.pid).children(), "the keeper")
        self._inside = psutil.Process(self._keeper.pid).children()[0].pid
        wait_for(lambda: self._is_apart(), "its namespaces")
        # The path from outside: the tmpfs has no other name here.
        self.files = Path(f"/proc/{self._inside}/root/run")
        self.run("sh", "-c", SETUP.format(nodes=self.size, head=HEAD))
        config = CONFIG.format(nodes=self.size, head=HEAD, node_timeout=self._node_timeout)
        (self.files / "slurm.conf").write_text(config)
        gres = f"NodeName=n[1-{self.size}] Name=gpu File=/run/dev/gpu[0-7]\n"
        (self.files / "gres.conf").write_text(gres)
        self._daemon("munged", *MUNGED)
        self.wait(lambda: self._answers("munge", "-n", "-S", "/run/munge/sock"), "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for number in range(1, self.size + 1):
            self._daemon(f"n{number}", *self._slurmd(f"n{number}"))
        self.wait(lambda: len(self.idle_nodes()) == self.size, "all nodes to be idle")

    def _is_apart(self) -> bool:
        own, its = (os.readlink(f"/proc/{pid}/ns/uts") for pid in ("self", self._inside))
        return own != its and "cat" in Path(f"/proc/{self._inside}/cmdline").read_text()

    def _slurmd(self, node: str) -> list[str]:
        # As Debian has it: to itself a machine is 127.0.1.1.
        hosts = f"sed 's/.* {node}$/127.0.1.1 {node}/' /run/hosts > /run/hosts.{node}"
        naming = f"{hosts} && mount --bind /run/hosts.{node} /etc/hosts && hostname {node}"
        disk = "mount -t tmpfs none /run/disk"  # of this node alone
        script = f"{naming} && {disk} && exec slurmd -D -N {node}"
        machine = [*NEW_MACHINE, "--uts", "--ipc", "sh", "-c", script]
        return ["nsenter", f"--net=/run/netns/{node}", *machine]

    def _command(self, *argv: str, cwd: str | Path = "/", environ: dict | None = None):
        enter = ("nsenter", f"--target={self._inside}", "--all")
        variables = {"SLURM_CONF": "/run/slurm.conf", **(environ or {})}
        settings = [f"{name}={value}" for name, value in variables.items()]
        return [*enter, "env", f"--chdir={cwd}", *settings, *map(str, argv)]

    def _environ(self) -> dict[str, str]:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        return {**kept, "PATH": path}

    def _daemon(self, name: str, *argv: str) -> None:
        self._daemons[name] = subprocess.Popen(
            self._command(*argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=self._environ(),
        )

    def _answers(self, *argv: str) -> bool:
        done = subprocess.run(self._command(*argv), capture_output=True, env=self._environ())
        return done.returncode == 0

    def run(self, *argv: str, cwd: str | Path = "/", environ: dict | None = None) -> str:
        """Run a command inside; returns its output. Raises AssertionError if it fails."""
        command = self._command(*argv, cwd=cwd, environ=environ)
        done = subprocess.run(command, capture_output=True, text=True, env=self._environ())
        assert done.returncode == 0, f"{' '.join(map(str, argv))}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def wait(self, condition, what: str, timeout: float = 240):
        """Poll until `condition` holds. AssertionError shows the end of the controller's log."""
        return wait_for(condition, what, timeout, self._last_words)

    def _last_words(self) -> str:
        log = self.files / "log" / "slurmctld.log"
        return log.read_text()[-3000:] if log.exists() else ""

    def idle_nodes(self) -> list[str]:
        if not self._answers("scontrol", "ping"):
            return []
        return self.run("sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N").split()

    def submit(self, *script: str, flags: tuple[str, ...], cwd: Path, environ: dict) -> int:
        """`sbatch` a script with its arguments; returns the job's number."""
        asked = self.run("sbatch", "--parsable", *flags, *script, cwd=cwd, environ=environ)
        return int(asked.split(";")[0])

    def is_queued(self, number: int) -> bool:
        return self.job(number)["JobState"] in LASTING

    def job(self, number: int) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, Restarts, ExitCode, NodeList, ..."""
        text = self.run("scontrol", "show", "job", "-o", str(number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_until_ended(self, number: int, timeout: float = 300) -> dict[str, str]:
        self.wait(lambda: not self.is_queued(number), f"job {number} to end", timeout)
        return self.job(number)

    def processes(self, node: str, name: str = "albert_ds") -> list[psutil.Process]:
        """Processes on a node with `name` in their command line, as this machine sees them."""
        processes = []
        for process in psutil.Process(self._daemons[node].pid).children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if any(name in word for word in command) and "python" in command[0]:
                processes.append(process)
        return processes

    def kill_node(self, node: str) -> None:
        """Kill every process of the node at once, as a power cut does."""
        for process in psutil.Process(self._daemons[node].pid).children(recursive=True):
            if process.is_running() and process.name() == "slurmd":
                process.kill()  # the first process of its pid namespace: the kernel kills the rest
                break
        self._daemons[node].wait()

    def start_node(self, node: str) -> None:
        self._daemon(node, *self._slurmd(node))

    def set_cable(self, node: str, state: str) -> None:
        """Disconnect the node from the network (`down`) or connect it again (`up`)."""
        self.run("ip", "link", "set", f"v{node[1:]}", state)
