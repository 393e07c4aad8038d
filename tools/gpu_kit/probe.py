"""What the GPU machine is; and its loopback interface, which NCCL and gloo need, is brought up."""

import fcntl
import os
import resource
import socket
import struct
import subprocess
import sys
from importlib.metadata import version

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # of a network interface, linux/sockios.h
COMMANDS = (
    "nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,power.limit --format=csv",
    "uname -r; nproc; free -g | sed -n 2p; df -h /tmp /dev/shm | tail -2",
    "nvcc --version | tail -2; ls $CUDA_HOME/include/cusparse.h; echo CPATH=$CPATH",
)
PACKAGES = ("torch", "triton", "deepspeed", "megatron-core", "transformers", "numpy")


def raise_loopback() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, GET_FLAGS, asked))
        if flags & UP:
            return "lo is up"
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", flags | UP))
        return "lo was down, now it is up"


def main() -> None:
    for command in COMMANDS:
        subprocess.run(command, shell=True, check=False)
    print(raise_loopback(), "; open files", resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            found[name] = "missing"
    print("python", sys.version.split()[0], found, flush=True)
    import torch  # after all that is known without it

    print("cuda", torch.version.cuda, torch.cuda.get_device_properties(0), os.cpu_count(), "cores")


if __name__ == "__main__":
    main()
