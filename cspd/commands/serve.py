"""`cspd serve`: a page in the browser, whose visitors share the engines."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
import warnings

from cspd.commands.options import embedded_here, load_engine
from cspd.finding import checkpoint_files
from cspd.known import Resized
from cspd.loading import check_of_one
from cspd.parsing import API_KEY


def run(args: argparse.Namespace) -> None:
    try:
        from cspd.serving.app import Server, make_app
    except ModuleNotFoundError as missing:
        raise ValueError(f"cspd serve needs {missing.name}: pip install 'cspd[serve]'") from None
    names = list(dict.fromkeys(args.checkpoint or embedded_here()))
    for name in names:
        checkpoint_files(name)  # raises now, and not when others are loaded
    check_of_one(names, args.arch, args.vae, args.draft_checkpoint, args.eagle, args.text_encoder)

    with listening(args.host, args.port) as listener:
        engines = {name: load_engine(_of(args, name), args.max_batch) for name in names}
        warnings.simplefilter("ignore", Resized)  # the page shows it
        host, port = listener.getsockname()[:2]
        address = ipaddress.ip_address(host)
        access = {
            "hosts": [args.host, host, *args.allowed_hosts],
            "origins": args.allowed_hosts,
            "any_address": not address.is_loopback,
            "key": args.api_key,
        }
        app = make_app(engines, args.max_requests, args.max_per_visitor, **access)
        if not address.is_loopback and args.api_key is None:
            warning = f"anybody who can reach {host}, port {port}, can use this page: give --api-key, or set {API_KEY}"
            print(f"cspd: warning: {warning}", file=sys.stderr)
        shown = f"[{host}]" if ":" in host else host
        asks = "" if args.api_key is None else "; the page asks for the API key"
        print(f"http://{shown}:{port} serves {', '.join(names)}{asks}; Ctrl-C ends it", flush=True)
        Server(app).run(sockets=[listener])


def _of(args: argparse.Namespace, checkpoint: str) -> argparse.Namespace:
    """The options, of one checkpoint."""
    return argparse.Namespace(**vars(args) | {"checkpoint": checkpoint})


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be listened on ({error.strerror}): give another --port or --host"
        ) from None
