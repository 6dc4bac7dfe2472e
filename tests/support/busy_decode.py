"""A decode worker with an embedded agent that holds the interpreter while a transfer comes in.

python -m tests.support.busy_decode SECONDS ADDRESS
"""

import ctypes
import sys

from pdxfer.agent.config import AgentConfig
from pdxfer.client import DecodeClient
from pdxfer.embedded import decode_agent
from tests.support.caches import SeededCache, small


def main(seconds, address):
    config = AgentConfig(role="decode", socket_path="", lanes=("tcp",))
    with decode_agent(config) as agent, DecodeClient(agent, SeededCache(small(), 2)) as client:
        client.connect(address)
        receiving = client.receive(7, address, [3], tokens=16)
        print("busy", flush=True)
        ctypes.PyDLL(None).sleep(seconds)  # PyDLL, unlike CDLL, keeps the interpreter locked
        print(receiving.wait(20.0).length_bytes, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
