"""A child process for the tests of `pdxfer.launch`: does what its options say."""

import time

from pdxfer.launch.child import child_main


def run(channel, options):
    channel.send(event="ready", said=options["say"])
    while True:
        order = channel.receive(None)
        match order["do"]:
            case "echo":
                channel.send(event="echo", value=order["value"])
            case "fail":
                raise ValueError("as asked")
            case "leave":
                raise SystemExit(7)
            case "hang":
                time.sleep(order["seconds"])


if __name__ == "__main__":
    child_main(run)
